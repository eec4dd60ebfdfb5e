"""The page for people: that it is whole, reads what there is, and runs nothing but its own script."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest

from meshfusion.dpu.api.address import TcpAddress
from meshfusion.dpu.telemetry.http_server import TelemetryServer
from meshfusion.dpu.telemetry.status_page import FILE_NAME, content_policy, status_page
from meshfusion.jbof.segment_states import SegmentTally
from tests.dpu.telemetry.page_cases import COUNTERS, several_pools_json, silent_pool_json, status_json
from tests.dpu.telemetry.test_http_server import ask
from tests.dpu.telemetry.test_metrics import counter_names

HTML: Final = status_page()["/"]().body.decode()
(SCRIPT,) = re.findall(r"<script>(.*?)</script>", HTML, re.DOTALL)
(STYLE,) = re.findall(r"<style>(.*?)</style>", HTML, re.DOTALL)
NODE: Final = shutil.which("node")
VOID: Final = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Tags that are closed as they were opened, and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")


@pytest.fixture(scope="module")
def outline() -> Outline:
    outline = Outline()
    outline.feed(HTML)
    outline.close()
    return outline


def test_it_is_whole_and_names_each_place_once(outline: Outline) -> None:
    assert (outline.open, outline.wrong) == ([], [])
    assert len(set(outline.ids)) == len(outline.ids)
    used = set(re.findall(r'(?:byId|fillTable)\("([\w-]+)"', SCRIPT))
    assert used <= set(outline.ids)
    labels = {value for _, name, value in outline.attributes if name == "aria-labelledby"}
    assert labels <= set(outline.ids)


def test_it_asks_nobody_but_the_service(outline: Outline) -> None:
    references = {
        value for _, name, value in outline.attributes if name in ("src", "href", "action", "srcset", "style")
    }
    assert references == {"data:,", "status.json"}
    assert not [name for _, name, _ in outline.attributes if name.startswith("on")]
    assert not re.search(r"https?:|//\w|@import|url\(", STYLE + re.sub(r"^\s*//.*$", "", SCRIPT, flags=re.MULTILINE))
    assert re.findall(r"\bfetch\(([^,]+)", SCRIPT) == ["path"]
    asked = re.findall(r"\bask\((?!path)(.*?\.json\")\)", SCRIPT)
    assert asked == ['"status.json"', '"pools/" + encodeURIComponent(chosen) + "/status.json"']


def test_words_of_others_cannot_become_markup() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "createContextual",
                "DOMParser", "srcdoc", "setAttributeNS", ".href", ".src"):  # fmt: skip
        assert way not in SCRIPT, way
    assert set(re.findall(r'setAttribute\("([\w-]+)"', SCRIPT)) == {"role", "aria-label"}


def test_nothing_but_its_script_and_style_may_run() -> None:
    """The digests are those that browsers compute: of the text between the tags."""
    server = TelemetryServer(TcpAddress("127.0.0.1", 0), status_page())
    server.start()
    code, headers, body = ask(server, "/")
    server.close()
    assert (code, body.decode(), headers["Content-Type"]) == (200, HTML, "text/html; charset=utf-8")

    def sha256(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": sha256(SCRIPT),
        "style-src": sha256(STYLE),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert "\r" not in HTML, "browsers compute it of other line ends"


def test_it_is_in_what_is_installed() -> None:
    """An editable install has it anyhow."""
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["meshfusion.dpu.telemetry"]
    assert any(fnmatch.fnmatch(FILE_NAME, pattern) for pattern in patterns)


def test_a_page_with_two_scripts_has_no_policy() -> None:
    with pytest.raises(AssertionError, match="2 elements script"):
        content_policy(b"<script>1</script><style></style><script>2</script>")


def objects(status: dict[str, Any]) -> dict[str, Any]:
    """What the script has under these names."""
    event, call = status["events"][0], status["slow_calls"][0]
    return {
        "status": status,
        "shown": status,
        "told": status,
        "pool": status["pool"],
        "ready": status["ready"],
        "drive": status["drives"][0],
        "holder": status["pool"]["holders"][0],
        "event": event,
        "call": call,
        "map": status["segment_map"],
        "part": status["segment_map"]["drives"][0],
        "cell": dict.fromkeys(status["segment_map"]["fields"]),
    }


def test_what_it_reads_is_what_the_service_tells() -> None:
    status = json.loads(status_json())
    known = objects(status)
    # While the pool does not answer; the name of the file; where there are several; and JavaScript's own.
    optional = {("status", "problem"), ("status", "json"), ("status", "pools")}
    several = {path: json.loads(body) for path, body in several_pools_json().items()}
    assert list(several["/status.json"]["pools"]) == ["red", "lab"]
    of_red, at_once = several["/pools/red/status.json"], several["/status.json"]["pools"]["red"]
    assert set(status) - {"version", "events", "slow_calls", "segment_map"} <= set(at_once)
    assert set(status) <= set(of_red), "what is shown of one of several is what is of an only one"
    assert "segment_map" not in at_once, "those of all pools, every 2 s, would be much"
    read = set(re.findall(rf"\b({'|'.join(known)})\.([a-z_]+)\b(?!\()", SCRIPT))
    lacking = {(name, field) for name, field in read - optional if field not in known[name]}
    assert lacking == set()
    assert len(read) > 50, "the pattern still finds them"
    assert "problem" in json.loads(silent_pool_json())
    assert status["segment_map"]["fields"] == list(SegmentTally._fields)


def test_the_counters_that_it_shows_are_counted() -> None:
    shown = set(re.findall(r'\bcount\("(\w+)"\)', SCRIPT)) | {name for name in COUNTERS if name.startswith("reserve_")}
    assert shown >= {"match_requests", "leases_released", "dropped_chunks", "committed_chunks"}
    assert shown <= counter_names()


def test_numbers_that_json_lacks_are_told_as_null() -> None:
    drive = json.loads(status_json())["drives"][0]
    assert drive["months_left"] is None
    assert "drive.months_left === null" in SCRIPT, "an endless life is not an unknown one"


if NODE is not None:  # elsewhere the browser of the nightly tests is the first to read it

    def test_the_script_is_one(tmp_path: Path) -> None:
        (tmp_path / "page.js").write_text(SCRIPT)
        subprocess.run([str(NODE), "--check", str(tmp_path / "page.js")], check=True, timeout=60)
