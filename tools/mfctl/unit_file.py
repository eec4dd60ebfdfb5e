"""The systemd unit of a service, filled in for its configuration and this machine. Nothing here does I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.privileges import capabilities

# Systemd makes and owns a directory below each, when it is named.
_MADE: Final = {
    "RuntimeDirectory": PurePath("/run"),
    "StateDirectory": PurePath("/var/lib"),
    "LogsDirectory": PurePath("/var/log"),
}
_HOMES: Final = (PurePath("/home"), PurePath("/root"), PurePath("/run/user"))
_TEMPORARY: Final = (PurePath("/tmp"), PurePath("/var/tmp"))
# What closing takes beyond stop_grace_s: running calls end, targets and drives get their time to answer.
CLOSING_S: Final = 65
_SIGHUP: Final = "/bin/kill -HUP $MAINPID"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:@+,=-]+")


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """``serve``, ``reload``: command lines; None for ``reload``: by a signal. ``writes``: directories and files that
    the service writes to, absolute. ``reads``: others that it uses, such as its own code. ``devices``: of the pool's
    drives that are no files. ``exports_by_kernel``: over nvmet, whose settings are files below ``/sys``.
    ``is_encrypted``: some are, by the device mapper, whose devices come and go."""

    user: str
    serve: tuple[str, ...]
    reload: tuple[str, ...] | None
    mounts: tuple[Path, ...]
    writes: tuple[Path, ...]
    reads: tuple[Path, ...]
    stop_grace_s: float
    devices: tuple[Path, ...]
    exports_by_kernel: bool
    is_encrypted: bool = False


def unit_text(template: str, facts: UnitFacts) -> str:
    """Raises :class:`ConfigError` for a path that cannot stand in a unit file."""
    used = (*facts.writes, *facts.reads)
    values = {
        "USER": facts.user,
        "SERVE": _command(facts.serve),
        "RELOAD": _SIGHUP if facts.reload is None else _command(facts.reload),
        "MOUNTS": " ".join(map(_word, facts.mounts)),
        "STOP_S": str(math.ceil(facts.stop_grace_s) + CLOSING_S),
        "DIRECTORIES": "\n".join(_directories(facts.writes)),
        "DEVICES": "\n".join(_devices(facts)),
        "PROTECT_HOME": "read-only" if _any_below(used, _HOMES) else "yes",
        "PRIVATE_TMP": "no" if _any_below(used, _TEMPORARY) else "yes",
        "PROTECT_TUNABLES": "no" if facts.exports_by_kernel else "yes",
    }
    return _filled(template, values)


def _filled(template: str, values: Mapping[str, str]) -> str:
    names = set(re.findall(r"@([A-Z_]+)@", template))
    assert names == values.keys(), f"the template and its values differ: {names ^ values.keys()}"
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], template)


def _directories(writes: Iterable[Path]) -> list[str]:
    made: dict[str, list[str]] = {}
    others: list[str] = []
    for path in writes:
        for directive, base in _MADE.items():
            if base in path.parents and not _any_below((path,), _HOMES):
                name = path.relative_to(base).parts[0]
                if name not in made.setdefault(directive, []):
                    made[directive].append(name)
                break
        else:
            others.append(_word(path))
    lines = [f"{directive}={' '.join(map(_word, names))}" for directive, names in made.items()]
    # Engines of the same user use the socket and the pool's files; nobody else enters.
    lines += [f"{directive}Mode=0750" for directive in made]
    if others:
        lines.append(f"ReadWritePaths={' '.join(dict.fromkeys(others))}")
    return lines


def _devices(facts: UnitFacts) -> list[str]:
    if not facts.devices:
        lines = ["PrivateDevices=yes"]
    else:
        # All NVMe drives besides: one that is plugged in anew may have another name, and others may be added.
        named = [f"DeviceAllow={_word(device)} rw" for device in dict.fromkeys(facts.devices)]
        lines = ["DevicePolicy=closed", *named, "DeviceAllow=block-blkext rw", "DeviceAllow=char-nvme rw"]
        if facts.is_encrypted:
            lines += ["DeviceAllow=/dev/mapper/control rw", "DeviceAllow=block-device-mapper rw"]
            lines.append("ReadWritePaths=-/run/cryptsetup")  # its locks; tmpfiles.d of cryptsetup makes it
        if facts.user != "root":
            lines += [
                "# As this user, drives' health and reservations are out of reach, see docs/drives.md: they need root.",
                "SupplementaryGroups=disk",
            ]
    needed = capabilities(
        is_root=facts.user == "root",
        has_devices=bool(facts.devices),
        exports_by_kernel=facts.exports_by_kernel,
        is_encrypted=facts.is_encrypted,
    )
    return [*lines, f"CapabilityBoundingSet={' '.join(f'CAP_{name}' for name in needed)}"]


def _any_below(paths: Iterable[PurePath], bases: Iterable[PurePath]) -> bool:
    bases = tuple(bases)
    return any(base == path or base in path.parents for path in paths for base in bases)


def _command(words: Iterable[str]) -> str:
    return " ".join(map(_word, words))


def _word(value: object) -> str:
    """As it may stand in a list of words: systemd reads quotes, specifiers (%) and variables ($) in them."""
    text = str(value)
    if not _PLAIN.fullmatch(text):
        raise ConfigError(
            f"{text!r} cannot stand in a systemd unit: it has other characters than A-Z a-z 0-9 _ . / : @ + , = -",
            next_step="Use a path without them.",
        )
    return text
