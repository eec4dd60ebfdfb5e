"""What differs between the configuration that a service runs with and a new one, and which of that it can take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel

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


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """``running``: what the service runs with once the ``report`` is carried out."""

    report: ReloadReport
    running: ServiceConfig


def compare(before: ServiceConfig, after: ServiceConfig) -> ConfigChanges:
    """``before``: what the service runs with, ``after``: what the file says now."""
    former, latter = dict(_leaves(before.model_dump())), dict(_leaves(after.model_dump()))
    changed = [key for key in (*former, *latter) if former.get(key) != latter.get(key)]
    changes = [ConfigChange(key, _shown(former, key), _shown(latter, key)) for key in dict.fromkeys(changed)]
    report = ReloadReport(
        applied=tuple(change for change in changes if change.key in RELOADABLE),
        needs_restart=tuple(change for change in changes if change.key not in RELOADABLE),
    )
    return ConfigChanges(report, _with(before, after, [change.key for change in report.applied]))


def tuning_of(config: ServiceConfig) -> Tuning:
    """With ``pools``, what is of ``medium`` has no meaning: each has its own."""
    return Tuning(
        drive_writes_per_day=config.medium.drive_writes_per_day,
        free_fraction=config.medium.free_fraction,
        max_pinned_fraction=config.leases.max_pinned_fraction,
        quarantine_max_fraction=config.leases.quarantine_max_fraction,
        check_interval_s=config.drives.check_interval_s,
        drain_s=config.drives.drain_s,
    )


def _leaves(part: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    """For people; a secret's text is its type's own, which hides it."""
    value = leaves.get(key)
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _with(before: ServiceConfig, after: ServiceConfig, keys: list[str]) -> ServiceConfig:
    """``before``, but for these keys, which both have."""
    merged = before
    for key in keys:
        *parts, name = key.split(".")
        assert len(parts) <= 1, "keys that can be reloaded lie at most one level deep"
        value = getattr(getattr(after, parts[0]) if parts else after, name)
        if not parts:
            merged = merged.model_copy(update={name: value})
            continue
        part: BaseModel = getattr(merged, parts[0])
        merged = merged.model_copy(update={parts[0]: part.model_copy(update={name: value})})
    return merged
