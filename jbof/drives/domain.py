"""Where a drive stands, and what fails together with it: drive, port, DPU, enclosure, rack.

Discovery tells what it can see; the configuration says the rest, by serial number, slot or for all drives, and wins.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshfusion.jbof.errors import ConfigError


class Level(enum.Enum):
    """What can fail, from the smallest to the largest. The values are the fields of :class:`FailureDomain`."""

    DRIVE = "drive"
    PORT = "port"
    DPU = "dpu"
    ENCLOSURE = "enclosure"
    RACK = "rack"


@dataclass(frozen=True, slots=True)
class Location:
    """Where it was found this time. "" for what cannot be seen.

    ``slot``: the enclosure's or the machine's name of the place. ``address``: on the bus, or of the transport.
    """

    slot: str = ""
    address: str = ""
    transport: str = ""


@dataclass(frozen=True, slots=True)
class FailureDomain:
    """Names, equal where things fail together. "" is unknown.

    ``drive`` is of the hardware: two namespaces of one drive have the same.
    """

    drive: str
    port: str = ""
    dpu: str = ""
    enclosure: str = ""
    rack: str = ""

    def at(self, level: Level) -> str:
        name: str = getattr(self, level.value)
        return name

    def shares(self, other: FailureDomain, level: Level) -> bool:
        """May one failure at ``level`` take both? Unknown counts as yes (rule 6)."""
        mine, theirs = self.at(level), other.at(level)
        return not mine or not theirs or mine == theirs

    def __str__(self) -> str:
        """From the largest, known parts only: ``r1/shelf-2/dpu-0/0000:3a:00.0/S6XN1``."""
        return "/".join(name for level in reversed(Level) if (name := self.at(level)))


_SETTABLE = tuple(level.value for level in Level if level is not Level.DRIVE)


@dataclass(frozen=True, slots=True)
class DomainMap:
    """From the configuration: names by level, for all drives, by slot and by serial number; the latter wins."""

    for_all: Mapping[str, str] = field(default_factory=dict)
    by_slot: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    by_serial: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def placed(self, found: FailureDomain, *, serial: str, slot: str) -> FailureDomain:
        """``found`` by discovery, with what the configuration says of this drive."""
        names = {**self.for_all, **self.by_slot.get(slot, {}), **self.by_serial.get(serial, {})}
        return dataclasses.replace(found, **names) if names else found


def domain_map(document: Any) -> DomainMap:
    """From a mapping with ``all``, ``slots`` and ``serials``, as of a YAML file.

    Raises :class:`~meshfusion.jbof.errors.ConfigError`, naming the place.
    """
    parts = _mapping(document, "the file")
    if unknown := set(parts) - {"all", "slots", "serials"}:
        raise _problem(f"has {', '.join(sorted(map(str, unknown)))}", "the keys are all, slots and serials")
    return DomainMap(
        _names(parts.get("all", {}), "all"),
        {key: _names(names, f"slots.{key}") for key, names in _mapping(parts.get("slots", {}), "slots").items()},
        {key: _names(names, f"serials.{key}") for key, names in _mapping(parts.get("serials", {}), "serials").items()},
    )


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _problem(f"{where} is no mapping", "write names below it, each with its value")
    return {str(key): item for key, item in value.items()}


def _names(value: Any, where: str) -> dict[str, str]:
    names = _mapping(value, where)
    for name, text in names.items():
        if name not in _SETTABLE:
            raise _problem(f"{where} has {name}", f"the levels are {', '.join(_SETTABLE)}")
        if not isinstance(text, str | int) or not str(text):
            raise _problem(f"{where}.{name} is {text!r}", "write a name")
    return {name: str(text) for name, text in names.items()}


def _problem(what: str, fix: str) -> ConfigError:
    return ConfigError(f"failure domains: {what}", next_step=f"{fix[0].upper()}{fix[1:]}.")
