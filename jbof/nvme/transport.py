"""What queue pairs and a transport tell each other, as values.

A *link* is one connection with its queue pair, known by a number that is never used again. The contract of a
transport, which :mod:`meshfusion.jbof.nvme.rdma` and the simulation of the tests keep:

- an :class:`OpenLink` is answered by one :class:`LinkUp` or :class:`LinkBroken`, receive buffers being posted before;
- a link that was up may break: :class:`LinkBroken`. Nothing but :class:`LinkDead` has a meaning afterwards;
- a :class:`KillLink`, at any time, once for a link, is answered by :class:`LinkDead` as the link's last event: its
  queue pair is destroyed, so that **no memory is read or written any more** through it. A transport that cannot be
  sure of that does not say so;
- a link with windows has them from :class:`LinkUp`, none of them bound, to its death, which ends all their keys. What a
  :class:`PostCapsule` binds is bound before its capsule is sent, and opens nothing to other links.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.sgl import RemoteMemory


class OpenLink(NamedTuple):
    """Connect. ``depth``: capsules in flight and receive buffers; ``private_data``: of the connection request.

    ``window_count``: memory windows that it is to have.
    """

    link: int
    depth: int
    private_data: bytes
    deadline_s: float
    window_count: int = 0


class Bind(NamedTuple):
    """Let ``key`` open ``memory`` to the link's target, to be written if ``is_written``, else to be read.

    ``window``: which of the link's, from 0 on; it is not bound. ``memory``: of a region that is reached through windows
    only; its ``rkey`` is the transport's number of the region.
    """

    window: int
    key: int
    memory: RemoteMemory
    is_written: bool


class PostCapsule(NamedTuple):
    """Send. ``command_id`` comes back in :class:`Sent`; it differs from those of all sends under way on the link.

    ``bind`` comes first, without an answer: a link that cannot do it breaks.
    """

    link: int
    command_id: int
    capsule: bytes
    bind: Bind | None = None


class InvalidateKey(NamedTuple):
    """End ``key``, which the target did not. Answered by :class:`KeyInvalidated` with the same ``command_id``."""

    link: int
    command_id: int
    key: int


class KillLink(NamedTuple):
    link: int


TransportEffect = OpenLink | PostCapsule | InvalidateKey | KillLink


class LinkUp(NamedTuple):
    """Connected. ``private_data``: of the target's accept; ``window_keys``: of each window, as it was made."""

    link: int
    private_data: bytes
    window_keys: tuple[int, ...] = ()


class LinkBroken(NamedTuple):
    """The connection could not be made, or has ended; the queue pair may still be alive."""

    link: int
    error: MeshFusionError


class Sent(NamedTuple):
    """The target's NIC has the capsule: it will not be read from here again."""

    link: int
    command_id: int


class Received(NamedTuple):
    """A response capsule. ``invalidated_key``: the key that came with it to be invalidated, and now is."""

    link: int
    data: bytes
    invalidated_key: int | None = None


class KeyInvalidated(NamedTuple):
    """The key of this command opens nothing any more."""

    link: int
    command_id: int


class LinkDead(NamedTuple):
    link: int


LinkEvent = LinkUp | LinkBroken | Sent | Received | KeyInvalidated | LinkDead


SCRATCH_BYTES: Final = 16384  # holds the ANA log of Linux' target, which cannot be read in parts


class Scratch(Protocol):
    """A small piece of registered memory for the data of admin commands and for range lists."""

    @property
    def remote(self) -> RemoteMemory: ...

    def read(self, length_bytes: int) -> bytes: ...

    def write(self, data: bytes) -> None: ...


class ScratchPool(Protocol):
    """All pieces are ``SCRATCH_BYTES`` long."""

    def lend(self) -> Scratch | None:
        """None: all are lent."""
        ...

    def give_back(self, scratch: Scratch) -> None: ...
