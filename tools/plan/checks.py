"""What must be enough for what, and what to do where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SERVICE_PROCESSORS: Final = 1.0
"""The service is one process of one interpreter: more than one processor's time it cannot use."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``needed`` and ``available`` are names of quantities; of an available rate only ``utilisation_max`` is planned
    with where ``is_rate``. ``next_step``: where it is not enough."""

    title: str
    needed: str
    available: str
    is_rate: bool
    next_step: str


@dataclass(frozen=True, slots=True)
class Check:
    """``limit``: what of ``available`` may be planned with."""

    rule: Rule
    needed: float
    available: float
    limit: float

    @property
    def is_enough(self) -> bool:
        return self.needed <= self.limit


_FEWER_BYTES: Final = "send fewer requests to this pool"
RULES: Final = (
    Rule("room on the drives", "needed_bytes", "usable_bytes", False,
         "Take more or larger drives, or accept a shorter working set and with it fewer hits."),
    Rule("read rate of a drive", "drive_reads", "drive_read_rate", True,
         f"Take more drives, or {_FEWER_BYTES}."),
    Rule("write rate of a drive", "drive_writes", "drive_write_rate", True,
         "Take more drives, or let the pool write less: medium.policy: learned, medium.drive_writes_per_day."),
    Rule("loads over a port", "nic_out", "nic_rate", True, f"Take more or faster ports, or {_FEWER_BYTES}."),
    Rule("saves over a port", "nic_in", "nic_rate", True, f"Take more or faster ports, or {_FEWER_BYTES}."),
    Rule("endurance of a drive", "worn_drive_writes_per_day", "rated_drive_writes_per_day", False,
         "Set medium.drive_writes_per_day to the rating, which keeps to it and saves less; or take more, larger or "
         "more durable drives."),
    Rule("memory of the DPU", "memory_needed", "dpu_memory", False,
         "Take larger chunks (chunk_min_bytes of the connector), less --target-memory, or a machine with more memory; "
         "an index that is larger than memory works, but slower than was measured."),
    Rule("processor of the service", "service_processors", "service_processors_available", True,
         "Take larger chunks (chunk_min_bytes of the connector), or divide engines among several services."),
)  # fmt: skip


def check(values: Mapping[str, Any]) -> tuple[Check, ...]:
    """Of the rules whose quantities are known."""
    known = {"service_processors_available": SERVICE_PROCESSORS, **values}
    return tuple(
        Check(rule, known[rule.needed], known[rule.available], _limit(rule, known))
        for rule in RULES
        if rule.needed in known and rule.available in known
    )


def _limit(rule: Rule, known: Mapping[str, Any]) -> float:
    share: float = known["utilisation_max"] if rule.is_rate else 1.0
    available: float = known[rule.available]
    return available * share
