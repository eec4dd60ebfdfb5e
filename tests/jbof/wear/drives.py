"""Drives to choose from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from meshfusion.jbof.wear.state import DriveState

SEGMENT_BYTES = 1 << 30
PLAIN = DriveState(
    drive_id="A",
    domain=("rack 1", "enclosure 1"),
    accepts_segments=True,
    segment_count=100,
    free_segments=10,
    reclaimable_segments=50,
    openings_left=1,
    percentage_used=0,
    bytes_written=0,
    rated_endurance_bytes=10**15,
    budget_left_bytes=100 * SEGMENT_BYTES,
)


def drive(drive_id: str = "A", **fields: Any) -> DriveState:
    return replace(PLAIN, drive_id=drive_id, **fields)


@st.composite
def states(draw: st.DrawFn, drive_id: str) -> DriveState:
    free_segments = draw(st.integers(0, 100))
    percentage_used = draw(st.integers(0, 255))
    endurance = draw(st.integers(10**14, 10**16))
    return drive(
        drive_id,
        domain=(draw(st.sampled_from("12")), draw(st.sampled_from("xyz"))),
        accepts_segments=draw(st.booleans()),
        free_segments=free_segments,
        reclaimable_segments=draw(st.integers(0, 100 - free_segments)),
        openings_left=draw(st.integers(0, 2)),
        percentage_used=percentage_used,
        bytes_written=draw(st.integers(0, 2 * endurance)),
        rated_endurance_bytes=endurance,
        budget_left_bytes=draw(st.integers(0, 3)) * SEGMENT_BYTES // 2,
    )


@st.composite
def shelves(draw: st.DrawFn) -> list[DriveState]:
    return [draw(states(drive_id)) for drive_id in "ABCDEF"[: draw(st.integers(0, 6))]]
