"""The page for people, ``/``: one static file, which asks ``/status.json`` by itself.

It holds its style and its script; the header that goes with it lets exactly these two run, by their digests, and
nothing else: no word of an engine could become a part of the page, even where the page had a mistake.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Final

from meshfusion.dpu.telemetry.pages import Page, Pages

FILE_NAME: Final = "status_page.html"


def status_page() -> Pages:
    """To be added to the usual ones. The file is read once, here."""
    html = resources.files("meshfusion.dpu.telemetry").joinpath(FILE_NAME).read_bytes()
    headers = (
        ("Content-Security-Policy", content_policy(html)),
        ("Referrer-Policy", "no-referrer"),
    )
    page = Page(200, "text/html; charset=utf-8", html, headers)
    return {"/": lambda: page}


def content_policy(html: bytes) -> str:
    """For a page with one ``script`` and one ``style`` element. See
    https://www.w3.org/TR/CSP3/#framework-directive-source-list."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest_of('script', html)}",
            f"style-src {_digest_of('style', html)}",
            "connect-src 'self'",
            "img-src data:",  # its icon, which is empty: browsers ask for one otherwise
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _digest_of(tag: str, html: bytes) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
    assert len(found) == 1, f"the page has {len(found)} elements {tag}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"
