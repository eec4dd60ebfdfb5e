"""From desired and actual to the next steps. Pure.

A plan goes as far as is known to be safe; after it, the target is read again and the next plan made, until a plan is
empty. Within a plan everything that takes away comes before anything that gives, and in one subsystem:

- hosts are removed first, then listeners and namespaces: who must go loses access before anything else changes;
- a new key of a host takes access from whoever has the old one, and waits for nothing: no connection ends by it;
- nothing is given while a host is being removed or a host that should be gone still has queue pairs: it would get what
  is given to others, since access to a subsystem is access to all of it;
- namespaces are complete before hosts are allowed, and listeners come last: who connects finds everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshfusion.dpu.export.actual import Actual, ActualSubsystem, AllowedHost, Connection
from meshfusion.dpu.export.desired import Export, Host, HostKey, Subsystem
from meshfusion.dpu.export.steps import (
    AddHost,
    AddListener,
    AddNamespace,
    CreateSubsystem,
    DeleteSubsystem,
    DenyAnyHost,
    RemoveHost,
    RemoveListener,
    RemoveNamespace,
    SetAnaState,
    SetHostKey,
    Step,
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A subsystem that can go no further now; the target must finish something by itself."""

    nqn: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Empty and nothing waiting: actual is as desired."""

    steps: tuple[Step, ...] = ()
    waiting: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """The plan of one subsystem."""

    taking: tuple[Step, ...] = ()
    giving: tuple[Step, ...] = ()
    waiting: tuple[Waiting, ...] = ()


def diff(desired: Export, actual: Actual, *, removal_disconnects: bool) -> Plan:
    """``removal_disconnects``: whether this target disconnects a host that is removed from a subsystem (SPDK does,
    nvmet does not). Where it does not, the subsystem is made anew.
    """
    wanted = {subsystem.nqn: subsystem for subsystem in desired.admitted()}
    there = {subsystem.nqn: subsystem for subsystem in actual if desired.manages(subsystem.nqn)}
    parts = []
    for nqn in sorted(wanted.keys() | there.keys()):
        if nqn not in there:
            parts.append(_create(wanted[nqn]))
        elif nqn not in wanted:
            parts.append(_remove(there[nqn]))
        else:
            parts.append(_change(wanted[nqn], there[nqn], removal_disconnects))
    return Plan(
        steps=tuple(step for part in parts for step in part.taking)
        + tuple(step for part in parts for step in part.giving),
        waiting=tuple(waiting for part in parts for waiting in part.waiting),
    )


def _create(wanted: Subsystem) -> _Part:
    create = CreateSubsystem(wanted.nqn, wanted.serial)
    return _Part(giving=(create, *_giving(wanted, ActualSubsystem(wanted.nqn, wanted.serial))))


def _remove(there: ActualSubsystem) -> _Part:
    if there.pending:
        return _Part(waiting=(Waiting(there.nqn, there.pending),))
    steps: list[Step] = [DenyAnyHost(there.nqn)] if there.allow_any_host else []
    steps += _removals(there, there.hosts)
    draining = _draining([connection for connection in there.connections if not connection.live], there)
    if draining:  # to remove a namespace now would only wait for the same requests
        return _Part(taking=tuple(steps), waiting=draining)
    addresses = sorted((listener.address for listener in there.listeners), key=str)
    steps += [RemoveListener(there.nqn, address) for address in addresses]
    steps += [RemoveNamespace(there.nqn, nsid) for nsid in sorted(ns.nsid for ns in there.namespaces)]
    return _Part(taking=(*steps, DeleteSubsystem(there.nqn)))


def _change(wanted: Subsystem, there: ActualSubsystem, removal_disconnects: bool) -> _Part:
    allowed = {host.nqn: host for host in wanted.hosts}
    leaving = [host for host in there.hosts if host.nqn not in allowed or _must_come_anew(host, allowed[host.nqn])]
    strangers = {
        connection.host_nqn
        for connection in there.connections
        if connection.live and connection.host_nqn not in there.host_nqns | allowed.keys()
    }
    # A stranger's connection was under way while it was removed, and the target will not remove it again.
    stuck = bool(strangers) and not there.allow_any_host
    if not removal_disconnects:
        stuck = stuck or bool(leaving) or there.allow_any_host
    if there.pending or there.foreign or there.serial != wanted.serial or stuck:
        return _remove(there)
    taking: list[Step] = [DenyAnyHost(there.nqn)] if there.allow_any_host else []
    taking += _removals(there, leaving)
    gone = [connection for connection in there.connections if connection.host_nqn not in allowed]
    draining = _draining(gone, there)
    keys = _new_keys(there.nqn, allowed, there.hosts.difference(leaving))
    if taking or draining:
        return _Part(taking=(*taking, *keys), waiting=draining)
    taking += keys
    addresses = {listener.address for listener in wanted.listeners}
    unwanted = {listener.address for listener in there.listeners} - addresses
    taking += [RemoveListener(there.nqn, address) for address in sorted(unwanted, key=str)]
    wrong = there.namespaces - wanted.namespaces
    taking += [RemoveNamespace(there.nqn, nsid) for nsid in sorted(namespace.nsid for namespace in wrong)]
    return _Part(tuple(taking), _giving(wanted, there))


def _removals(there: ActualSubsystem, hosts: Iterable[AllowedHost]) -> list[Step]:
    return [
        RemoveHost(there.nqn, host.nqn, tuple(key for key in (host.key_id, host.psk_id) if key))
        for host in sorted(hosts, key=lambda host: host.nqn)
    ]


def _must_come_anew(there: AllowedHost, wanted: Host) -> bool:
    """Only a key can take a key's place."""
    return (
        bool(there.key_id) != (wanted.key is not None)
        or bool(there.psk_id) != (wanted.psk is not None)
        or _is_other(wanted.psk, there.psk_id)
    )


def _new_keys(nqn: str, wanted: Mapping[str, Host], there: Iterable[AllowedHost]) -> list[Step]:
    return [
        SetHostKey(nqn, wanted[host.nqn], host.key_id)
        for host in sorted(there, key=lambda host: host.nqn)
        if _is_other(wanted[host.nqn].key, host.key_id)
    ]


def _is_other(wanted: HostKey | None, there_id: str) -> bool:
    return wanted is not None and bool(wanted.id) and wanted.id != there_id


def _draining(connections: Iterable[Connection], there: ActualSubsystem) -> tuple[Waiting, ...]:
    """Of hosts that have lost access: the target has yet to finish their requests."""
    hosts = sorted({connection.host_nqn for connection in connections} - there.host_nqns)
    return tuple(Waiting(there.nqn, f"queue pairs of {host} are still being torn down") for host in hosts)


def _giving(wanted: Subsystem, there: ActualSubsystem) -> tuple[Step, ...]:
    namespaces = sorted(wanted.namespaces - there.namespaces, key=lambda namespace: namespace.nsid)
    hosts = sorted((host for host in wanted.hosts if host.nqn not in there.host_nqns), key=lambda host: host.nqn)
    steps: list[Step] = [AddNamespace(wanted.nqn, namespace) for namespace in namespaces]
    steps += [AddHost(wanted.nqn, host) for host in hosts]
    listening = {listener.address: listener for listener in there.listeners}
    for listener in sorted(wanted.listeners, key=str):
        if listener.address not in listening:
            steps.append(AddListener(wanted.nqn, listener, wanted.is_secure))
        elif listening[listener.address] != listener:
            steps.append(SetAnaState(wanted.nqn, listener))
    return tuple(steps)
