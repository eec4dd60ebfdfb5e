"""What is kept of a flash while it runs, so that a later run can go on with it. The text only; files are elsewhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.dpu.image.flash_types import Phase, Snapshot
from meshfusion.dpu.image.install_log import InstallLog, Milestone

_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """``image``: digests of bundle and BFB together, so that another image is another flash. ``wall_s``: of the last
    change, in seconds since the epoch."""

    image: str
    snapshot: Snapshot
    wall_s: float


def entry_to_json(entry: Entry) -> str:
    log = entry.snapshot.log
    return json.dumps({
        "format": _FORMAT,
        "image": entry.image,
        "phase": entry.snapshot.phase.value,
        "wall_s": entry.wall_s,
        "passed": sorted(milestone.name for milestone in log.passed),
        "fatal": log.fatal,
        "partial": log.partial,
        "wants_power_cycle": log.wants_power_cycle,
        "lines": log.lines,
    })  # fmt: skip


def entry_from_json(text: str) -> Entry | None:
    """None for what was not written by this version, or not whole: a flash is then begun anew."""
    try:
        data: Any = json.loads(text)
        if data["format"] != _FORMAT:
            return None
        log = InstallLog(
            passed=frozenset(Milestone[str(name)] for name in data["passed"]),
            fatal=tuple(map(str, data["fatal"])),
            partial=tuple(map(str, data["partial"])),
            wants_power_cycle=bool(data["wants_power_cycle"]),
            lines=tuple(map(str, data["lines"])),
        )
        return Entry(str(data["image"]), Snapshot(Phase(data["phase"]), log), float(data["wall_s"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
