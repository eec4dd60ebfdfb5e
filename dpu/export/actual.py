"""What a target reports, in the words of ``desired``."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshfusion.dpu.export.desired import Listener, Namespace


@dataclass(frozen=True, slots=True)
class Connection:
    """A host that has queue pairs. ``live``: not being torn down."""

    host_nqn: str
    live: bool


OTHER_KEY = "other"
"""In place of a key's id: a secret that nothing is known of."""


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """A host that may connect. ``key_id``, ``psk_id``: of the secrets that it must have, as in
    :class:`~meshfusion.dpu.export.desired.Host`, or ``OTHER_KEY``; empty: it needs none."""

    nqn: str
    key_id: str = ""
    psk_id: str = ""


@dataclass(frozen=True, slots=True)
class ActualSubsystem:
    """``hosts``: those that may connect.

    ``foreign``: what it has that no :class:`~meshfusion.dpu.export.desired.Subsystem` could describe (a listener of
    another transport, say); such a subsystem is made anew. ``pending``: why it cannot be touched now, or empty.
    ``unread``: why its connections are not known, or empty; only of one that is not managed. ``backings``: what lies
    behind any of its namespaces, those that are foreign or not enabled among them.
    """

    nqn: str
    serial: str
    allow_any_host: bool = False
    namespaces: frozenset[Namespace] = frozenset()
    hosts: frozenset[AllowedHost] = frozenset()
    listeners: frozenset[Listener] = frozenset()
    connections: frozenset[Connection] = frozenset()
    foreign: str = ""
    pending: str = ""
    unread: str = ""
    backings: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def host_nqns(self) -> frozenset[str]:
        return frozenset(host.nqn for host in self.hosts)


Actual = tuple[ActualSubsystem, ...]
"""Every subsystem of the target except the discovery one, managed or not."""
