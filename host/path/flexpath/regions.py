"""Memory that every path may reach: registered with each path's device, under a key of its own there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshfusion.jbof.nvme.memory import RegionPart, RegisteredRegion
from meshfusion.jbof.nvme.registration import MemoryRange
from meshfusion.jbof.nvme.sgl import RemoteMemory

_NO_KEY = 0  # what a target is told comes from the region of the path that is taken


class SharedRegion(RegisteredRegion):
    """Names memory without a path: its parts say where in it, and :meth:`parts_on` what a path calls that.

    It counts the transfers of FlexPath; the regions of the paths count those of their initiators.
    """

    def __init__(
        self, memory: MemoryRange, *, writable: bool, owner: object, forget: Callable[[SharedRegion], None]
    ) -> None:
        super().__init__(RemoteMemory(memory.first_iova, memory.length_bytes, _NO_KEY), owner, self._close_all)
        self.memory = memory
        self.writable = writable
        self.memory_owner = owner
        self._forget = forget
        self._regions: dict[int, RegisteredRegion] = {}

    def put(self, path: int, region: RegisteredRegion) -> None:
        """From now on this is what ``path`` reaches it by. One of an earlier connection is its initiator's to close."""
        assert region.remote.length_bytes == self.remote.length_bytes
        self._regions[path] = region

    def on(self, path: int) -> RegisteredRegion:
        return self._regions[path]

    def _close_all(self) -> None:
        self._forget(self)
        for region in self._regions.values():
            region.close()
        self.memory_owner = None


def parts_on(path: int, parts: Sequence[RegionPart]) -> list[RegionPart]:
    """The same memory as ``path`` reaches it."""
    moved = []
    for part in parts:
        assert isinstance(part.region, SharedRegion), "memory that was not registered with FlexPath"
        moved.append(part.region.on(path).part(part.offset_bytes, part.length_bytes))
    return moved
