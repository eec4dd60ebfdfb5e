"""Registered memory: what targets may reach, for how long, and who says so.

Who may use a key, and until when:

- *Whom.* A key opens its bytes to the queue pairs of the protection domain that it was made in, and to no others: the
  device checks that. Each transport has a protection domain of its own, so a key that was told to one target is worth
  nothing to another, nor to another worker's connections.
- *What.* The bytes that were registered, and writing only where that was asked for: the device checks that, too.
- *Until when.* The key is dead when :meth:`RegisteredRegion.close` or :meth:`RegisteredRegion.revoke` returns, for then
  the device has no such region. Closing is refused while a transfer may use the memory; revoking is for the end of an
  association, when its queue pairs are destroyed. What cannot be ended is not said to be: both raise then.

That is the scope :attr:`~.key_scope.KeyScope.REGION`: a target is trusted with the memory that its hosts registered for
it, and what it wrote is proven (rule 4). With :attr:`~.key_scope.KeyScope.COMMAND` it need not be trusted beyond a
command. The region has no key then; a memory window is bound for each command, whose key

- opens that command's bytes only, to be written for a read and to be read for a write, and to its queue pair only;
- is dead before the command counts as ended: the target invalidates it with its response, or else it is done here
  (:mod:`.queue`). What a target does late then meets a key that opens nothing, and costs the connection.

This takes a bind before each command on its send queue, and a second work request after those whose target does not
invalidate, but no round trip; and a command has one piece of memory. Scratch memory is ours alone and keeps its key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import SCRATCH_BYTES, Scratch


class MemoryInUseError(MeshFusionError):
    """Registered memory cannot be given up while commands may touch it."""


class RegionPart(NamedTuple):
    """``length_bytes`` of a region, from ``offset_bytes`` on."""

    region: RegisteredRegion
    offset_bytes: int
    length_bytes: int

    @property
    def remote(self) -> RemoteMemory:
        return self.region.remote.part(self.offset_bytes, self.length_bytes)


class RegisteredRegion:
    """``remote`` says how targets address it. ``owner`` keeps the memory alive; ``deregister`` ends their access.

    Uses are counted without a lock, for every command counts two. A user enters itself before it looks whether the
    region is closed, and who closes marks it closed before looking for users: one of them sees the other.
    """

    def __init__(self, remote: RemoteMemory, owner: object, deregister: Callable[[], None]) -> None:
        self.remote = remote
        self._owner: object = owner
        self._deregister = deregister
        self._closing = threading.Lock()
        self._uses: list[None] = []  # a list, whose append and pop are atomic
        self._is_closed = False

    @property
    def use_count(self) -> int:
        """Transfers whose commands may touch it."""
        return len(self._uses)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def part(self, offset_bytes: int, length_bytes: int) -> RegionPart:
        assert 0 <= offset_bytes < offset_bytes + length_bytes <= self.remote.length_bytes
        return RegionPart(self, offset_bytes, length_bytes)

    def all(self) -> RegionPart:
        return RegionPart(self, 0, self.remote.length_bytes)

    def acquire(self) -> None:
        """A transfer begins to use it."""
        self._uses.append(None)
        if self._is_closed:
            self._uses.pop()
            raise AssertionError("this region is closed")

    def release(self) -> None:
        assert self._uses
        self._uses.pop()

    def close(self) -> None:
        """End all access. Raises :class:`MemoryInUseError` while transfers use it; again is no error."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            if use_count := len(self._uses):
                self._is_closed = False
                raise MemoryInUseError(
                    f"{use_count} transfers may still touch the {self.remote.length_bytes} bytes at "
                    f"{self.remote.address:#x}",
                    next_step="Wait until they have ended and their memory is free.",
                )
            self._end()

    def revoke(self) -> None:
        """End all access whatever uses are counted: for when no queue pair is left that could. Again is no error."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._end()

    def _end(self) -> None:
        try:
            self._deregister()
        except BaseException:
            self._is_closed = False
            raise
        self._owner = None


class RegionScratch:
    """A slot of a region, seen through ``view``."""

    def __init__(self, remote: RemoteMemory, view: memoryview) -> None:
        self.remote = remote
        self._view = view

    def read(self, length_bytes: int) -> bytes:
        return bytes(self._view[:length_bytes])

    def write(self, data: bytes) -> None:
        self._view[: len(data)] = data


class RegionScratchPool:
    """Scratch memory in slots of a region that lies at ``buffer``, which is writable."""

    def __init__(self, region: RegisteredRegion, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        count = region.remote.length_bytes // SCRATCH_BYTES
        self._free = [
            RegionScratch(region.remote.part(at, SCRATCH_BYTES), view[at : at + SCRATCH_BYTES])
            for at in range(0, count * SCRATCH_BYTES, SCRATCH_BYTES)
        ]

    def lend(self) -> Scratch | None:
        return self._free.pop() if self._free else None

    def give_back(self, scratch: Scratch) -> None:
        assert isinstance(scratch, RegionScratch)
        assert scratch not in self._free
        self._free.append(scratch)
