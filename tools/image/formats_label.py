"""The label by which an image tells what its service reads and writes, for who upgrades to it (dpu/formats.py)."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from meshfusion.dpu.formats import IMAGE_LABEL, own_formats_text
from meshfusion.tools.image.source import Source

_DECIDE: Final = ("dpu/formats.py", "dpu/api/types.py", "dpu/store/records.py", "jbof/format.py")
"""Where the versions stand."""


def formats_label(source: Source, version: str) -> dict[str, str]:
    """Of the service in ``source``, which calls itself ``version``; empty where this tool is of another state of the
    code, so that it cannot tell: an upgrade to that image has to be asked for as one without a way back."""
    if all(_own(path) == _of(source, path) for path in _DECIDE):
        return {IMAGE_LABEL: own_formats_text(version)}
    return {}


def _own(path: str) -> bytes:
    unit, _, rest = path.partition("/")
    return files(f"meshfusion.{unit}").joinpath(rest).read_bytes()


def _of(source: Source, path: str) -> bytes | None:
    entry = source.files.get(path)
    return None if entry is None else entry.data
