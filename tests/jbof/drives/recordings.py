"""Pages, and what nvme-cli 2.3 says of them: an independent reading of the same bytes.

Those whose source is "QEMU 7.2" are of its emulated drives (an ordinary one and a zoned one). The others were made, so
that every field has a value of its own, and given to nvme-cli as a drive's answers.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple


class Recording(NamedTuple):
    kind: str
    source: str
    page: bytes
    said: Any


@functools.cache
def recordings() -> tuple[Recording, ...]:
    content = json.loads((Path(__file__).parent / "recordings/nvme-cli-2.3.json").read_text())
    return tuple(
        Recording(r["page_kind"], r["source"], zlib.decompress(base64.b64decode(r["page"])), r["nvme_cli"])
        for r in content["records"]
    )


def of_kind(kind: str, source: str = "") -> list[Recording]:
    found = [r for r in recordings() if r.kind == kind and (not source or r.source == source)]
    assert found
    return found


def page_of(kind: str, source: str = "made", index: int = 0) -> bytes:
    return of_kind(kind, source)[index].page
