"""A whole plan: every figure that follows from what is given, and what is not enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.dpu.export.spdk.sizing import Machine, size
from meshfusion.dpu.pool_sizes import size_problems, usual_segment_bytes
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.sizes import format_size
from meshfusion.tools.plan.bandwidth import BANDWIDTH, LOADING
from meshfusion.tools.plan.capacity import CAPACITY, ENDURANCE, room_in_segment
from meshfusion.tools.plan.checks import Check, check
from meshfusion.tools.plan.formula import Formula, evaluate
from meshfusion.tools.plan.given import GIVEN
from meshfusion.tools.plan.model import MODEL
from meshfusion.tools.plan.model_form import largest_shard_bytes
from meshfusion.tools.plan.service import SERVICE, target_connections

SECTIONS: Final[Mapping[str, tuple[Formula, ...]]] = {
    "KV of the model": MODEL,
    "Reads and writes": BANDWIDTH,
    "Load or recompute": LOADING,
    "Room": CAPACITY,
    "Endurance": ENDURANCE,
    "DPU or storage server": SERVICE,
}
FORMULAS: Final = tuple(entry for entries in SECTIONS.values() for entry in entries)
DERIVED: Final = frozenset({"form", "target"})
"""What formulas need that is neither a number nor given as one: the model's chunks, and the target's buffers."""


_OF_THE_TARGET: Final = frozenset({"target_memory", "target_cores"})


@dataclass(frozen=True, slots=True)
class Plan:
    """``values``: of all quantities that are known, by name; those of ``computed`` by formulas. ``lacking``: why others
    are not: what is not given. ``defaults``: names of what is not given and has a default. ``problems``: what is not
    enough beside ``checks``, each with its next step."""

    values: Mapping[str, Any]
    computed: frozenset[str]
    lacking: Mapping[str, tuple[str, ...]]
    defaults: frozenset[str]
    checks: tuple[Check, ...]
    problems: tuple[ConfigError, ...]

    @property
    def used(self) -> frozenset[str]:
        """Of what is given, names of what anything was computed or checked with."""
        needs = {need for entry in FORMULAS if entry.name in self.computed for need in entry.needs}
        compared = {name for found in self.checks for name in (found.rule.needed, found.rule.available)}
        beside = {"utilisation_max"} if any(found.rule.is_rate for found in self.checks) else set()
        if "target" in needs or self.problems:
            beside |= _OF_THE_TARGET
        return frozenset(needs | compared | beside)

    @property
    def is_enough(self) -> bool:
        return not self.problems and all(found.is_enough for found in self.checks)


def make_plan(form: ChunkForm, given: Mapping[str, Any]) -> Plan:
    """``given``: by the names of :data:`~meshfusion.tools.plan.given.GIVEN`.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` for drives that no pool can be made on.
    """
    stated = {name: value for name, value in given.items() if value is not None}
    defaults = {entry.name: entry.default for entry in GIVEN if entry.default is not None and entry.name not in stated}
    known: dict[str, Any] = {**defaults, **stated, "form": form}
    _check_sizes(form, known)
    problems = []
    try:
        known["target"] = _target(known)
    except ConfigError as error:
        problems.append(error)
    found = evaluate(FORMULAS, known)
    checks = check(found.values)
    return Plan(found.values, found.computed, found.lacking, frozenset(defaults), checks, tuple(problems))


def _target(known: Mapping[str, Any]) -> Any:
    connections = target_connections.compute(**{name: known[name] for name in target_connections.needs})
    return size(Machine(known["target_memory"], known["target_cores"], connections=connections))


def _check_sizes(form: ChunkForm, known: Mapping[str, Any]) -> None:
    drive_bytes = known.get("drive_bytes")
    if drive_bytes is None:
        return
    segment_bytes = known.get("segment_bytes", usual_segment_bytes(drive_bytes))
    for found in size_problems(drive_bytes, segment_bytes):
        option = {"size": "--drive-size", "segment_size": "--segment-size"}[found.field]
        raise ConfigError(f"{option}: {found.problem}", next_step=f"{found.fix[:1].upper()}{found.fix[1:]}.")
    shard_bytes = largest_shard_bytes(form)
    if room_in_segment(segment_bytes, shard_bytes) < shard_bytes:
        raise ConfigError(
            f"--segment-size: a segment of {format_size(segment_bytes)} has no room for a shard of {shard_bytes} bytes",
            next_step="Use larger segments, or smaller chunks (--chunk-min-bytes).",
        )
