"""Drives as mfctl prints them: objects for programs, rows for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshfusion.jbof.drives.capabilities import Capabilities
from meshfusion.jbof.drives.domain import Level
from meshfusion.jbof.drives.drive import Drive, Found
from meshfusion.jbof.drives.health import Health, Warnings
from meshfusion.tools.mfctl.output import format_bytes

LIST_HEADERS = ("DRIVE", "MODEL", "SIZE", "BLOCK", "HEALTH", "USED", "MONTHS LEFT", "SLOT", "DOMAIN", "AT")
WEAR_HEADERS = ("DRIVE", "USED", "SPARE", "WRITTEN", "DRIVE WRITES", "PER DAY", "AMPLIFICATION", "MONTHS LEFT")

_HOURS_PER_DAY = 24


def found_object(found: Found) -> dict[str, Any]:
    return {
        "drives": [drive_object(drive) for drive in found.drives],
        "passed_over": [{"at": p.where, "reason": p.reason, "next_step": p.next_step} for p in found.passed],
    }


def drive_object(drive: Drive) -> dict[str, Any]:
    """Sizes in bytes unless a name says otherwise; None for what is not known."""
    return {
        "key": drive.identity.key,
        "serial": drive.identity.serial,
        "id": drive.identity.unique,
        "model": drive.identity.model,
        "firmware": drive.firmware,
        "kind": drive.kind.value,
        "at": drive.where,
        "slot": drive.location.slot,
        "address": drive.location.address,
        "transport": drive.location.transport,
        "domain": {level.value: drive.domain.at(level) for level in Level},
        "capacity_bytes": drive.capabilities.capacity_bytes,
        "capabilities": _capabilities_object(drive.capabilities),
        "health": None if drive.health is None else _health_object(drive.health),
        "health_note": drive.health_note,
        "wear": wear_object(drive),
        "users": list(drive.users),
        "problem": drive.capabilities.problem,
    }


def _capabilities_object(c: Capabilities) -> dict[str, Any]:
    hints, fdp, limits = c.hints, c.fdp, c.deallocate_limits
    names = ("npwg", "npwa", "npdg", "npda", "nows")
    return {
        "lba_bytes": c.lba_bytes,
        "metadata_bytes": c.metadata_bytes,
        "lba_formats": [{"lba_bytes": f.lba_bytes, "metadata_bytes": f.metadata_bytes} for f in c.formats],
        "hints_lbas": None if hints is None else {name: getattr(hints, name) for name in names},
        "deallocate": c.can_deallocate,
        "deallocate_max_lbas": None if limits is None else limits.dmsl or None,
        "deallocated_reads_as": c.deallocated_read.name.lower(),
        "volatile_write_cache": c.has_volatile_write_cache,
        "atomic_write_lbas": c.atomic.lbas,
        "atomic_write_power_fail_lbas": c.atomic.power_fail_lbas,
        "reservations": None if c.reservations is None else [flag.name for flag in c.reservations],
        "shared": c.is_shared,
        "write_protected": c.is_write_protected,
        "endurance_group": c.endurance_group or None,
        "fdp": None
        if fdp is None
        else {
            "enabled": fdp.enabled is not None,
            "handles": [len(config.handles) for config in fdp.configs],
            "reclaim_unit_bytes": [config.reclaim_unit_bytes for config in fdp.configs],
        },
        "zone_lbas": None if c.zones is None else c.zones.zone_lbas,
    }


def _health_object(h: Health) -> dict[str, Any]:
    return {
        "state": health_word(h),
        "warnings": [flag.name for flag in h.warnings],
        "temperature_c": h.temperature_c,
        "spare_percent": h.spare_percent,
        "spare_threshold_percent": h.spare_threshold_percent,
        "percentage_used": h.percentage_used,
        "media_errors": h.media_errors,
        "read_bytes": h.read_bytes,
        "written_bytes": h.written_bytes,
        "power_on_hours": h.power_on_hours,
        "power_cycles": h.power_cycles,
        "unsafe_shutdowns": h.unsafe_shutdowns,
    }


def wear_object(drive: Drive) -> dict[str, Any]:
    """What its life so far has cost, and how long it lasts at that rate; None for what is not known."""
    health = drive.health
    capacity_bytes = drive.capabilities.capacity_bytes
    writes = None if health is None or not capacity_bytes else health.written_bytes / capacity_bytes
    days = 0.0 if health is None else health.power_on_hours / _HOURS_PER_DAY
    return {
        "key": drive.identity.key,
        "percentage_used": None if health is None else health.percentage_used,
        "spare_percent": None if health is None else health.spare_percent,
        "written_bytes": None if health is None else health.written_bytes,
        "drive_writes": writes,
        "drive_writes_per_day": writes / days if writes is not None and days else None,
        "write_amplification": drive.write_amplification,
        "months_left_by_age": None if health is None else health.months_left_by_age,
    }


def health_word(health: Health | None) -> str:
    """``ok``, or what is the matter."""
    if health is None:
        return "unknown"
    words = [flag.name.lower().replace("_", " ") for flag in health.warnings if flag.name is not None]
    if health.is_spare_low and not health.warnings & Warnings.SPARE_LOW:
        words.append("spare low")
    if health.media_errors:
        words.append(f"{health.media_errors} media errors")
    return ", ".join(words) or "ok"


def list_row(drive: Drive) -> tuple[object, ...]:
    wear = wear_object(drive)
    return (
        *(drive.identity.key, drive.identity.model, format_bytes(drive.capabilities.capacity_bytes)),
        *(drive.capabilities.lba_bytes, health_word(drive.health), _percent(wear["percentage_used"])),
        *(_number(wear["months_left_by_age"], 0), drive.location.slot or "-", drive.domain, drive.where),
    )


def wear_row(drive: Drive) -> tuple[object, ...]:
    wear = wear_object(drive)
    written = wear["written_bytes"]
    return (
        *(wear["key"], _percent(wear["percentage_used"]), _percent(wear["spare_percent"])),
        *("-" if written is None else format_bytes(written), _number(wear["drive_writes"], 1)),
        *(_number(wear["drive_writes_per_day"], 2), _number(wear["write_amplification"], 2)),
        _number(wear["months_left_by_age"], 0),
    )


def flat_fields(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """``capabilities.lba_bytes  4096`` and so on, for reading."""
    fields: list[tuple[str, object]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            fields += flat_fields(value, f"{prefix}{name}.")
        else:
            fields.append((f"{prefix}{name}", _text(value)))
    return fields


def _text(value: object) -> object:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(" ".join(map(str, v.values())) if isinstance(v, Mapping) else str(v) for v in value) or "-"
    return f"{value:.2f}" if isinstance(value, float) else value


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value} %"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
