"""What differs between the configuration that a service runs with and a new one, and which of that it can take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from meshfusion.dpu.api.service_types import ConfigChange, ReloadReport
from meshfusion.dpu.config import ServiceConfig
from meshfusion.dpu.tuning import Tuning

# Key to what follows, for docs/mfctl.md. All others need a restart: engines were told of them when they attached, or
# they say what the service is made of.
RELOADABLE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "medium.drive_writes_per_day": "what is left of each drive's budget is kept",
        "medium.free_fraction": "from the next segment that is made ready on",
        "leases.max_pinned_fraction": "from the next lookup on; leases that are out stay",
        "leases.quarantine_max_fraction": "from the next reservation on",
        "drives.check_interval_s": "at once",
        "drives.drain_s": "for drives whose draining begins later",
        "stop_grace_s": "for the next signal to stop",
        "log.level": "at once",
        "log.format": "at once",
        "log.file": "at once; an unchanged one is opened anew",
    }
)
# Of each of several pools that is served already, within pools.NAME.
RELOADABLE_OF_A_POOL: Final = frozenset({"medium.drive_writes_per_day", "medium.free_fraction"})
assert RELOADABLE.keys() >= RELOADABLE_OF_A_POOL, "what can be changed of one of several can be of an only one"

_Path = tuple[str, ...]  # names of pools may hold dots


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """``running``: what the service runs with once the ``report`` is carried out."""

    report: ReloadReport
    running: ServiceConfig


def compare(before: ServiceConfig, after: ServiceConfig) -> ConfigChanges:
    """``before``: what the service runs with, ``after``: what the file says now."""
    former, latter = dict(_leaves(before.model_dump())), dict(_leaves(after.model_dump()))
    changed = [path for path in dict.fromkeys((*former, *latter)) if former.get(path) != latter.get(path)]
    # What only one of them has is of a pool that came or went, or of a part that did.
    applied = [path for path in changed if path in former and path in latter and _is_reloadable(path)]
    changes = {path: ConfigChange(".".join(path), _shown(former, path), _shown(latter, path)) for path in changed}
    running: Any = before
    for path in applied:
        running = _with(running, after, path)
    report = ReloadReport(
        applied=tuple(changes[path] for path in applied),
        needs_restart=tuple(change for path, change in changes.items() if path not in applied),
    )
    return ConfigChanges(report, running)


def tuning_of(config: ServiceConfig, pool: str = "") -> Tuning:
    """``pool``: the name of one of several, each of which has a ``medium`` of its own."""
    medium = config.medium_of(pool)
    return Tuning(
        drive_writes_per_day=medium.drive_writes_per_day,
        free_fraction=medium.free_fraction,
        max_pinned_fraction=config.leases.max_pinned_fraction,
        quarantine_max_fraction=config.leases.quarantine_max_fraction,
        check_interval_s=config.drives.check_interval_s,
        drain_s=config.drives.drain_s,
    )


def _is_reloadable(path: _Path) -> bool:
    if path[0] == "pools":
        return ".".join(path[2:]) in RELOADABLE_OF_A_POOL
    return ".".join(path) in RELOADABLE


def _leaves(part: Mapping[str, Any], at: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*at, str(name)))
        else:
            yield (*at, str(name)), value


def _shown(leaves: Mapping[_Path, Any], path: _Path) -> str:
    """For people; a secret's text is its type's own, which hides it."""
    value = leaves.get(path)
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _with(before: Any, after: Any, path: _Path) -> Any:
    """``before``, a model or a mapping of names to models, but for what stands at ``path``, which both have."""
    name, *rest = path
    if isinstance(before, Mapping):
        return {**before, name: _with(before[name], after[name], tuple(rest))}
    value = getattr(after, name)
    return before.model_copy(update={name: _with(getattr(before, name), value, tuple(rest)) if rest else value})
