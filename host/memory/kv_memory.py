"""What a path needs of the engine's KV memory, wherever that memory is.

The calls stand for the moments at which memory that others write may be read:

====================  ==================================================================  ===================
moment                who waits for what                                                  call
====================  ==================================================================  ===================
before a save reads   the engine's work that fills the blocks has been done               ``produced``, ``wait``
after a load wrote    what the RDMA device wrote is seen by whoever reads the memory      ``arrived``
before a load is told the blocks hold what was read (rule 4)                              ``digests``
====================  ==================================================================  ===================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.registration import DmaBufRange


class Registrar(Protocol):
    """With which memory is registered: an initiator, or several that look like one."""

    def register_address(
        self, address: int, length_bytes: int, *, writable: bool, owner: object
    ) -> RegisteredRegion: ...

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` where the RDMA device or its driver cannot."""
        ...


class Produced(Protocol):
    """A point in the engine's work."""

    def wait(self, timeout_s: float) -> None:
        """Until all work before it has been done; then the memory may be read, by RDMA devices too.

        Raises :class:`~meshfusion.jbof.errors.MediaError`: it is not known to be. Again is no error.
        """
        ...


class KvMemory(Protocol):
    """The KV memory of one worker. Paths use it from several threads; it is closed when all paths over it are."""

    def register(self, registrar: Registrar) -> RegisteredRegion:
        """All of it, so once for each registrar: offsets of a layout are offsets of the region.

        The region is the caller's to close. Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when there is no
        way that is known to be right, :class:`~meshfusion.jbof.errors.MediaError` when the system does not allow it.
        """
        ...

    def produced(self) -> Produced:
        """Now, in the work of the calling thread: called by the engine's thread when it has issued what fills blocks.

        Raises :class:`~meshfusion.jbof.errors.MediaError`.
        """
        ...

    def arrived(self) -> None:
        """RDMA writes that have ended are seen by all who read the memory from here on, also those that failed.

        Blocks may be told about, or used for something else, only afterwards: a write that is on its way inside of
        the machine could come later than the next owner's. Raises :class:`~meshfusion.jbof.errors.MediaError`.
        """
        ...

    def digests(self, layout: GroupLayout, block_ids: Sequence[int]) -> list[bytes]:
        """Of what each block holds now, computed where it lies. Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        ...

    def close(self) -> None:
        """Raises :class:`~meshfusion.jbof.nvme.memory.MemoryInUseError` while regions of it are open."""
        ...
