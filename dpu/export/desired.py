"""What should be exported: the same words for SPDK and for the kernel's target.

All values are frozen and compare by content. A value that no target could export raises
:class:`~meshfusion.jbof.errors.ConfigError`.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Literal
from uuid import UUID

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.fabrics import check_nqn

ANA_GROUP = 1
"""Every namespace is in this ANA group, so that a listener has one state. It is nvmet's default group."""

MAX_NAMESPACES = 255
"""Namespaces of one subsystem, thus its highest NSID: of every drive number. SPDK keeps and reports an ANA state for
each, by default for 32."""

KEY_ID = r"[0-9a-f]{16}"

MAX_SERIAL_CHARS = 20
"""NVMe Base Specification 2.0, Identify Controller: the serial number field has 20 bytes."""


class AnaState(Enum):
    """How a listener reaches the namespaces (NVMe Base Specification 2.0, section 8.1)."""

    OPTIMIZED = "optimized"
    NON_OPTIMIZED = "non_optimized"
    INACCESSIBLE = "inaccessible"


@dataclass(frozen=True, slots=True)
class Namespace:
    """``backing``: an SPDK bdev's name, or a block device's path. ``nguid``: 32 lower-case hexadecimal digits.
    ``file``: of which the bdev is to be made where there is none of that name; empty: it is somebody else's affair.
    Targets do not report it, so that it does not count when namespaces are compared."""

    nsid: int
    uuid: UUID
    nguid: str
    backing: str
    file: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.nsid <= MAX_NAMESPACES:
            raise _refusal(f"NSID {self.nsid} is not between 1 and {MAX_NAMESPACES}")
        if not re.fullmatch(r"[0-9a-f]{32}", self.nguid):
            raise _refusal(f"NGUID {self.nguid!r} is not 32 lower-case hexadecimal digits")
        if not self.backing or "\n" in self.backing or "\0" in self.backing:
            raise _refusal(f"backing {self.backing!r} names no device")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A secret, without it. ``file``: absolute path, mode 0600, with the secret's text. ``id``: of that text (see
    :func:`~meshfusion.jbof.nvme.auth_keys.key_id`), by which a target is known to have this one and no other; empty
    while the file cannot be read: then whichever the target has is left there."""

    file: Path
    id: str = ""

    def __post_init__(self) -> None:
        if not self.file.is_absolute():
            raise _refusal(f"key file {self.file} is not an absolute path")
        assert re.fullmatch(rf"({KEY_ID})?", self.id), self.id


@dataclass(frozen=True, slots=True)
class Host:
    """One worker incarnation: its NQN is never used again (rule 3).

    ``key``: its DH-HMAC-CHAP secret, as ``DHHC-1:`` text, or None for a host that need not authenticate. Another one
    takes its place without a connection being lost. ``psk``: its TLS secret, as ``NVMeTLSkey-1:`` text; this one stays
    as long as the host does, since no target takes another one without removing the host.
    """

    nqn: str
    key: HostKey | None = None
    psk: HostKey | None = None

    def __post_init__(self) -> None:
        check_nqn(self.nqn, what="host NQN")
        if "/" in self.nqn:
            raise _refusal(f"host NQN {self.nqn!r} holds a slash, which configfs cannot name")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener listens. ``service``: the TCP port, or that of the RDMA connection manager."""

    transport: Literal["tcp", "rdma"]
    ip: str
    service: int = 4420

    def __post_init__(self) -> None:
        if self.transport not in ("tcp", "rdma"):
            raise _refusal(f"transport {self.transport!r} is neither tcp nor rdma")
        try:
            ipaddress.ip_address(self.ip)
        except ValueError:
            raise _refusal(f"{self.ip!r} is not an IP address") from None
        if not 1 <= self.service <= 65535:
            raise _refusal(f"service {self.service} is not a port number")

    @property
    def family(self) -> Literal["ipv4", "ipv6"]:
        return "ipv6" if ":" in self.ip else "ipv4"


@dataclass(frozen=True, slots=True)
class Listener:
    address: Address
    ana_state: AnaState = AnaState.OPTIMIZED


@dataclass(frozen=True, slots=True)
class Subsystem:
    """What its hosts may reach, all of it one tenant's (rule 11): access is to every namespace in it.

    ``is_secure``: its listeners, all of TCP, take connections over TLS only, for which each host has a ``psk``. No
    target tells that of a listener, so that ``serial`` must say it: with another one the subsystem is made anew.
    """

    nqn: str
    tenant: str
    serial: str
    namespaces: frozenset[Namespace] = frozenset()
    hosts: frozenset[Host] = frozenset()
    listeners: frozenset[Listener] = frozenset()
    is_secure: bool = False

    def __post_init__(self) -> None:
        check_nqn(self.nqn, what="subsystem NQN")
        if "/" in self.nqn:
            raise _refusal(f"subsystem NQN {self.nqn!r} holds a slash, which configfs cannot name")
        if not re.fullmatch(rf"[!-~]{{1,{MAX_SERIAL_CHARS}}}", self.serial):
            raise _refusal(f"serial number {self.serial!r} is not 1 to {MAX_SERIAL_CHARS} printable characters")
        _check_unique(f"{self.nqn}: NSID", (namespace.nsid for namespace in self.namespaces))
        _check_unique(f"{self.nqn}: backing", (namespace.backing for namespace in self.namespaces))
        _check_unique(f"{self.nqn}: host", (host.nqn for host in self.hosts))
        _check_unique(f"{self.nqn}: listener", (listener.address for listener in self.listeners))
        if self.is_secure and any(listener.address.transport != "tcp" for listener in self.listeners):
            raise _refusal(f"{self.nqn}: TLS is for listeners of TCP")
        for host in self.hosts:
            if (host.psk is not None) != self.is_secure:
                raise _refusal(f"{self.nqn}: {host.nqn} has {'no' if self.is_secure else 'a'} key of TLS")


@dataclass(frozen=True, slots=True)
class Export:
    """All that one target should export.

    Every subsystem whose NQN begins with ``nqn_prefix`` is managed: one that is not listed is removed. Others are left
    alone. ``fenced``: hosts that are never admitted, whatever the subsystems say; whoever makes an Export keeps this
    list durably (rule 3).
    """

    nqn_prefix: str
    subsystems: frozenset[Subsystem] = frozenset()
    fenced: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_nqn(self.nqn_prefix, what="NQN prefix")
        _check_unique("subsystem", (subsystem.nqn for subsystem in self.subsystems))
        for subsystem in self.subsystems:
            if not self.manages(subsystem.nqn):
                raise _refusal(f"subsystem {subsystem.nqn} does not begin with {self.nqn_prefix}:")
        self._check_owners()

    def _check_owners(self) -> None:
        """Rule 11: a backing and a host belong to one tenant."""
        owners: dict[tuple[str, str], str] = {}
        for subsystem in self.subsystems:
            things = [("backing", namespace.backing) for namespace in subsystem.namespaces]
            things += [("host", host.nqn) for host in subsystem.hosts]
            for thing in things:
                owner = owners.setdefault(thing, subsystem.tenant)
                if owner != subsystem.tenant:
                    raise _refusal(f"{thing[0]} {thing[1]} would belong to tenants {owner} and {subsystem.tenant}")

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """All that are to be shown, to whomever."""
        return frozenset(namespace for subsystem in self.subsystems for namespace in subsystem.namespaces)

    def manages(self, nqn: str) -> bool:
        return nqn.startswith(self.nqn_prefix + ":")

    def fencing(self, hosts: frozenset[str]) -> Export:
        """The same with these hosts fenced too."""
        return replace(self, fenced=self.fenced | hosts)

    def admitted(self) -> frozenset[Subsystem]:
        """The subsystems as they should be, without the fenced hosts."""
        return frozenset(
            replace(subsystem, hosts=frozenset(host for host in subsystem.hosts if host.nqn not in self.fenced))
            for subsystem in self.subsystems
        )


def _check_unique(what: str, values: Iterable[object]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise _refusal(f"{what} {value} is there twice")


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"cannot be exported: {problem}", next_step="Correct the export's description.")
