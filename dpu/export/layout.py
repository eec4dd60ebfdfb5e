"""From tenants to subsystems: what each kind of target needs, so that a host can be cut off alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from meshfusion.dpu.export.desired import Export, Host, Listener, Namespace, Subsystem


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's namespaces, and its worker incarnations."""

    name: str
    namespaces: frozenset[Namespace]
    hosts: frozenset[Host]


def one_subsystem_per_tenant(
    nqn_prefix: str,
    tenants: Iterable[Tenant],
    listeners: frozenset[Listener],
    fenced: frozenset[str] = frozenset(),
    *,
    is_secure: bool = False,
) -> Export:
    """For SPDK: a bdev can be in one subsystem only (it is claimed), and removing a host disconnects it.

    ``is_secure``: over TLS only; see :class:`~meshfusion.dpu.export.desired.Subsystem`.
    """
    subsystems = frozenset(
        Subsystem(
            nqn=f"{nqn_prefix}:t-{_digest(tenant.name)}",
            tenant=tenant.name,
            serial=_serial(tenant.name, is_secure=is_secure),
            namespaces=tenant.namespaces,
            hosts=tenant.hosts,
            listeners=listeners,
            is_secure=is_secure,
        )
        for tenant in tenants
    )
    return Export(nqn_prefix, subsystems, fenced)


def one_subsystem_per_host(
    nqn_prefix: str, tenants: Iterable[Tenant], listeners: frozenset[Listener], fenced: frozenset[str] = frozenset()
) -> Export:
    """For nvmet: removing a host leaves it connected, so that only a subsystem of its own can be taken away (rule 3).

    A fenced host's subsystem is not wanted at all.
    """
    subsystems = frozenset(
        Subsystem(
            nqn=host_subsystem_nqn(nqn_prefix, host.nqn),
            tenant=tenant.name,
            serial=_serial(host.nqn),
            namespaces=tenant.namespaces,
            hosts=frozenset({host}),
            listeners=listeners,
        )
        for tenant in tenants
        for host in tenant.hosts
        if host.nqn not in fenced
    )
    return Export(nqn_prefix, subsystems, fenced)


def host_subsystem_nqn(nqn_prefix: str, host_nqn: str) -> str:
    """Follows from the host's NQN alone, so that its subsystem is found when it no longer lists the host."""
    return f"{nqn_prefix}:h-{_digest(host_nqn)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _serial(name: str, *, is_secure: bool = False) -> str:
    return f"{'MT' if is_secure else 'MF'}{_digest(name)[:18]}"
