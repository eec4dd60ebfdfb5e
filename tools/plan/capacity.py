"""Formulas of room on the drives, and of their endurance."""

from __future__ import annotations

from typing import Any, Final

from meshfusion.dpu.pool_sizes import usual_segment_bytes
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.jbof.format import DATA_START_LBA, LBA_BYTES
from meshfusion.jbof.policy.write_budget import DAY_S, months_left, used_share_per_day
from meshfusion.jbof.segment_format import SEGMENT_HEADER_LBAS, summary_lba_count
from meshfusion.jbof.wear.state import rated_endurance_bytes
from meshfusion.tools.plan.formula import Unit, formula
from meshfusion.tools.plan.model_form import largest_shard_bytes


def room_in_segment(segment_bytes: int, shard_bytes: int) -> int:
    """What shards may take up of a segment, in bytes: without header and summary, and without what is left over at its
    end, less than the largest shard. Rather too little; 0 or less where none fits."""
    blocks = segment_bytes // LBA_BYTES
    summary = summary_lba_count(max(1, segment_bytes // shard_bytes))
    return (blocks - SEGMENT_HEADER_LBAS - summary) * LBA_BYTES // shard_bytes * shard_bytes


@formula("size of a segment", Unit.BYTES, "dpu/pool_sizes.py: 64 MiB, or 1/2048 of the drive where that is more")
def segment_bytes(drive_bytes: int) -> Any:
    return usual_segment_bytes(drive_bytes)


@formula("segments of a drive", Unit.COUNT, "jbof/format.py: behind the first MiB of the drive")
def segments_per_drive(drive_bytes: int, segment_bytes: int) -> Any:
    return (drive_bytes - DATA_START_LBA * LBA_BYTES) // segment_bytes


@formula("segments", Unit.COUNT, "of the whole pool")
def segments(drives: int, segments_per_drive: int) -> Any:
    return drives * segments_per_drive


@formula(
    "room for chunks",
    Unit.BYTES,
    "jbof/segment_format.py: without headers, summaries, ends of segments and those that are kept free",
)
def usable_bytes(form: ChunkForm, segments: int, segment_bytes: int, free_fraction: float) -> Any:
    return segments * (1 - free_fraction) * room_in_segment(segment_bytes, largest_shard_bytes(form))


@formula("tokens that fit", Unit.TOKENS, "of this model")
def kept_tokens(usable_bytes: float, medium_bytes_per_token: float) -> Any:
    return usable_bytes / medium_bytes_per_token


@formula(
    "new KV is kept for", Unit.HOURS, "if whatever was written first goes first; a learned policy keeps what is used"
)
def kept_hours(usable_bytes: float, saved_bytes_per_s: float) -> Any:
    return usable_bytes / saved_bytes_per_s / 3600 if saved_bytes_per_s else float("inf")


@formula("room that the working set needs", Unit.BYTES, "all that is saved in its hours; of a trace what was found")
def needed_bytes(saved_bytes_per_s: float, working_set_hours: float) -> Any:
    return saved_bytes_per_s * working_set_hours * 3600


@formula("rated endurance of a drive", Unit.BYTES, "jbof/wear/state.py: what its maker allows hosts to write")
def rated_bytes(drive_bytes: int, rated_drive_writes_per_day: float, rated_years: float) -> Any:
    return rated_endurance_bytes(
        capacity_bytes=drive_bytes, drive_writes_per_day=rated_drive_writes_per_day, rated_years=rated_years
    )


@formula("written to each drive in a day", Unit.BYTES, "at this rate day and night")
def drive_writes_of_day(drive_writes: float) -> Any:
    return drive_writes * DAY_S


@formula("drive writes per day", Unit.PER_DAY, "as drives are rated, and as medium.drive_writes_per_day counts")
def drive_writes_per_day(drive_writes_of_day: float, drive_bytes: int) -> Any:
    return drive_writes_of_day / drive_bytes


@formula("drive writes per day of the flash", Unit.PER_DAY, "what the rating is compared with")
def worn_drive_writes_per_day(drive_writes_per_day: float, device_write_amplification: float) -> Any:
    return drive_writes_per_day * device_write_amplification


@formula("life of a new drive", Unit.MONTHS, "jbof/policy/write_budget.py, which tells the months that are left")
def life_months(drive_writes_of_day: float, rated_bytes: float, device_write_amplification: float) -> Any:
    return months_left(0, used_share_per_day(drive_writes_of_day, rated_bytes, device_write_amplification))


CAPACITY: Final = (
    segment_bytes, segments_per_drive, segments, usable_bytes, kept_tokens, kept_hours, needed_bytes,
)  # fmt: skip
ENDURANCE: Final = (rated_bytes, drive_writes_of_day, drive_writes_per_day, worn_drive_writes_per_day, life_months)
