"""From a pool and those who hold it to what its target should export. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from meshfusion.dpu.api.types import Export as Reach
from meshfusion.dpu.api.types import Portal
from meshfusion.dpu.export.actual import Actual
from meshfusion.dpu.export.desired import Export, Host, Listener, Namespace, Subsystem
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.export.layout import Tenant, one_subsystem_per_host, one_subsystem_per_tenant
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.pool_addresses import namespace_of

WHOLE_POOL = "default"  # to its exports a pool is one tenant, whoever share it; it stands in serials and NQNs
NQN_AUTHORITY = "nqn.2026-11.io.meshfusion"


class TargetKind(Enum):
    NVMET = "nvmet"
    SPDK = "spdk"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A pool's drives as namespaces of a target, for the incarnations that may reach them.

    ``backings``: by the drives' numbers, a block device or file each for nvmet, a bdev for SPDK; a drive that is not
    shown has none. ``socket``: of the SPDK that is meant.
    ``keys``: with which hosts authenticate themselves; None: they need not. ``psks``: with which they and the target
    encrypt what goes over TCP, with an SPDK; None: it is not encrypted. ``named_bdevs``: of an SPDK that has them
    by itself, by the drives' numbers; none: they are made, of ``files``.
    """

    kind: TargetKind
    nqn_prefix: str
    pool_uuid: uuid.UUID
    backings: Mapping[int, str]
    listeners: frozenset[Listener]
    socket: str = ""
    keys: HostKeys | None = None
    psks: HostKeys | None = None
    named_bdevs: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)

    def showing(self, drives: Mapping[int, Path]) -> ExportPlan:
        """The same for these drives: where they are, by their numbers. One without a bdev is left out, where bdevs are
        named."""
        backings = {number: self.backing_of(number, path) for number, path in drives.items()}
        files = {} if self.kind is TargetKind.NVMET or self.named_bdevs else {n: str(p) for n, p in drives.items()}
        return replace(self, backings={n: backing for n, backing in backings.items() if backing}, files=files)

    def backing_of(self, number: int, path: Path | None) -> str:
        """Of a drive that is, or was, at ``path``; empty: it is not known, or there is none."""
        if self.kind is TargetKind.NVMET:
            return str(path or "")
        return self.named_bdevs.get(number, "") if self.named_bdevs else bdev_of(self.pool_uuid, number)

    @property
    def name(self) -> str:
        """Of the target, and of what is managed there: what another one says of a host is worth nothing."""
        return f"{self.kind.value}{f' at {self.socket}' if self.socket else ''}, NQNs {self.nqn_prefix}"

    def export(self, incarnations: Iterable[str]) -> Export:
        """What should be exported for these and nobody else."""
        namespaces = frozenset(self._namespace(number, backing) for number, backing in self.backings.items())
        hosts = frozenset(map(self._host, incarnations))
        tenants = [Tenant(WHOLE_POOL, namespaces, hosts)]
        if self.kind is TargetKind.NVMET:
            return one_subsystem_per_host(self.nqn_prefix, tenants, self.listeners)
        return one_subsystem_per_tenant(self.nqn_prefix, tenants, self.listeners, is_secure=self.psks is not None)

    @property
    def secrets(self) -> tuple[HostKeys, ...]:
        """What each incarnation has one of."""
        return tuple(kind for kind in (self.keys, self.psks) if kind is not None)

    def host_nqn(self, incarnation: str) -> str:
        """Of this incarnation alone (rule 3)."""
        return f"{self.nqn_prefix}:host:{incarnation}"

    def reach(self, incarnation: str, key_id: str = "") -> Reach:
        """What the incarnation is told: where to connect to, and as whom. ``key_id``: of the key that its target asks
        for, which need not be the newest; empty: of that. Raises what reading its key raises."""
        subsystem = self._subsystem(incarnation)
        addresses = sorted((listener.address for listener in self.listeners), key=str)
        portals = tuple(Portal(address.transport, address.ip, address.service) for address in addresses)
        key = self.keys.read(incarnation, key_id) if self.keys is not None else ""
        psk = self.psks.read(incarnation) if self.psks is not None else ""
        return Reach(subsystem.nqn, self.host_nqn(incarnation), portals, key, psk)

    def is_served(self, actual: Actual, incarnation: str) -> bool:
        """Does the target report everything that this incarnation needs?"""
        wanted, host_nqn = self._subsystem(incarnation), self.host_nqn(incarnation)
        there = next((subsystem for subsystem in actual if subsystem.nqn == wanted.nqn), None)
        allowed = next((host for host in there.hosts if host.nqn == host_nqn), None) if there is not None else None
        return (
            there is not None
            and not there.pending
            and allowed is not None
            and bool(allowed.key_id) == (self.keys is not None)
            and bool(allowed.psk_id) == (self.psks is not None)
            and wanted.namespaces <= there.namespaces
            and wanted.listeners <= there.listeners
        )

    def key_ids(self, actual: Actual, incarnations: Iterable[str]) -> dict[str, str]:
        """Of the key that the target asks each of these for, whatever else it lacks; empty: it asks for none, or does
        not let it in."""
        manages = Export(self.nqn_prefix).manages
        there = {host.nqn: host.key_id for subsystem in actual if manages(subsystem.nqn) for host in subsystem.hosts}
        return {incarnation: there.get(self.host_nqn(incarnation), "") for incarnation in incarnations}

    def _namespace(self, number: int, backing: str) -> Namespace:
        """The first drive's has the pool's UUID, as that of a pool of one drive; the others' follow from it."""
        identity = self.pool_uuid if number == 0 else uuid.uuid5(self.pool_uuid, f"drive {number}")
        return Namespace(namespace_of(number), identity, identity.hex, backing, self.files.get(number, ""))

    def _host(self, incarnation: str) -> Host:
        key, psk = (kind.wanted(incarnation) if kind is not None else None for kind in (self.keys, self.psks))
        return Host(self.host_nqn(incarnation), key, psk)

    def _subsystem(self, incarnation: str) -> Subsystem:
        (subsystem,) = self.export([incarnation]).subsystems
        return subsystem


def check_bdevs(plan: ExportPlan, numbers: Iterable[int]) -> None:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` when bdevs are named, and not that of each of these."""
    missing = sorted(set(numbers) - plan.named_bdevs.keys()) if plan.named_bdevs else []
    if missing:
        raise ConfigError(
            f"the configuration names no bdev for drive {', '.join(map(str, missing))} of the pool",
            next_step="name a bdev for each drive's number: exports.spdk.bdevs; or none, for aio bdevs of the drives",
        )


def bdev_of(pool_uuid: uuid.UUID, number: int) -> str:
    """The name of the aio bdev that is made of a drive."""
    return f"mf-{pool_uuid}{f'-{number}' if number else ''}"


def nqn_prefix_of(pool_uuid: uuid.UUID, configured: str | None = None) -> str:
    """Each pool has its own, whatever is configured: services that share a target must leave each other's subsystems
    alone."""
    return f"{configured or NQN_AUTHORITY}:{pool_uuid}"
