"""Cutting a worker incarnation off, and knowing that it is (rule 3).

A fence is confirmed only by what the target says after access was removed; never by time. Whoever frees space after a
confirmation has made the fence durable before: a target that restarts has lost it and must be given it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.dpu.export.actual import Actual


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The host has no access, and none of its requests is in flight."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """It may still write. ``reason``: for people."""

    reason: str


Fence = Confirmed | NotYet


def withdrawal(actual: Actual, nsid: int, backing: str, is_ours: Callable[[str], bool]) -> Fence:
    """What a target's report, read after the namespace was removed, says of its drive: does anybody reach it yet?

    ``backing``: as the target knows it; empty where that is not known. ``is_ours``: of which subsystems, by their NQNs,
    the NSIDs are the pool's. A subsystem of somebody else that shows the drive counts as well. That a namespace is gone
    means that nothing is in flight there: SPDK pauses it before it removes it, until its requests are done
    (lib/nvmf/nvmf.c, nvmf_poll_group_pause_subsystem), and nvmet disables it, which waits for them.
    """
    for subsystem in actual:
        for namespace in subsystem.namespaces:
            if backing == namespace.backing or (is_ours(subsystem.nqn) and namespace.nsid == nsid):
                return NotYet(f"{subsystem.nqn} still shows it as namespace {namespace.nsid}")
        if backing in subsystem.backings:
            return NotYet(f"{subsystem.nqn} still has it behind a namespace")
        if is_ours(subsystem.nqn) and (subsystem.pending or subsystem.foreign):
            return NotYet(f"{subsystem.nqn}: {subsystem.pending or subsystem.foreign}")
    return Confirmed()


def verdict(actual: Actual, host_nqn: str, subsystem_nqn: str = "") -> Fence:
    """What a target's report, read after the host's removal, says of its fence.

    ``subsystem_nqn``: the host's own subsystem where it has one; that must be gone. Subsystems that are not managed
    count as well: whoever put the host there, it may reach namespaces through it.
    """
    for subsystem in actual:
        if host_nqn in subsystem.host_nqns:
            return NotYet(f"{subsystem.nqn} still allows {host_nqn}")
        if subsystem.unread:
            return NotYet(f"who is connected to {subsystem.nqn} is not known: {subsystem.unread}")
        if any(connection.host_nqn == host_nqn for connection in subsystem.connections):
            return NotYet(f"{host_nqn} still has queue pairs at {subsystem.nqn}")
        if subsystem.nqn == subsystem_nqn:
            return NotYet(subsystem.pending or f"{subsystem.nqn}, the subsystem of {host_nqn}, still exists")
    return Confirmed()
