"""Cutting a worker incarnation off, and knowing that it is (rule 3).

A fence is confirmed only by what the target says after access was removed; never by time. Whoever frees space after a
confirmation has made the fence durable before: a target that restarts has lost it and must be given it again.
"""

from __future__ import annotations

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
