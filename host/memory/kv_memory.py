"""What a path needs of the engine's KV memory, wherever that memory is.

The calls stand for the moments at which memory that others write may be read:

====================  ==================================================================  ===================
moment                who waits for what                                                  call
====================  ==================================================================  ===================
before a save reads   the engine's work that fills the blocks has been done               ``produced``, ``wait``
before a load writes  the engine's work with what the blocks held before has been done    the same
after a load wrote    what the RDMA device wrote is seen by whoever reads the memory      ``arrived``
before a load is told the blocks hold what was read (rule 4)                              ``digests``
====================  ==================================================================  ===================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshfusion.host.kv.group_layout import I64, GroupLayout
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.media.buffer import AlignedBuffer
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


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where KV memory lies: ``length_bytes`` at ``address``.

    ``device``: its name for people, such as cuda:0; empty: it is the host's. ``pci_address``: of that device, such as
    0000:3b:00.0; empty: of none. ``rdma_error``: why RDMA devices may not reach the memory; None: nothing speaks
    against it before it is registered.
    """

    address: int
    length_bytes: int
    device: str = ""
    pci_address: str = ""
    rdma_error: UnsupportedError | None = None


class CopyLostError(MediaError):
    """The end of a copy cannot be known: both its memory and its staging may be written or read at any later time."""


class Staging(Protocol):
    """A buffer of the host's between the medium and the KV memory, for one thread and one copy at a time.

    ``run_offsets``: int64[units, runs] in bytes, of a layout's
    :meth:`~meshfusion.host.kv.group_layout.GroupLayout.run_offsets_of`.
    """

    @property
    def buffer(self) -> AlignedBuffer:
        """Not to be touched between :meth:`begin_load` and the end of :meth:`end_load`.

        Raises :class:`CopyLostError` when it may not be touched at all any more.
        """
        ...

    def begin_load(self, stride_bytes: int, run_offsets: I64, run_bytes: int) -> None:
        """Units, ``stride_bytes`` apart from the begin of the buffer on, begin to go to their runs.

        Raises :class:`~meshfusion.jbof.errors.MediaError`: nothing of it is under way, though something was; and of
        these :class:`CopyLostError`, which says that something may be.
        """
        ...

    def end_load(self) -> list[bytes]:
        """When the copies have ended, however long it takes: the digests of what the memory holds, unit by unit.

        Raises as :meth:`begin_load`.
        """
        ...

    def save(self, offset_bytes: int, stride_bytes: int, run_offsets: I64, run_bytes: int) -> list[bytes]:
        """Units from their runs to the buffer, ``stride_bytes`` apart from ``offset_bytes`` on, and nothing between
        them; the digests of what the memory holds, which is what the buffer holds. Raises as :meth:`begin_load`.
        """
        ...

    def close(self) -> None: ...


class KvMemory(Protocol):
    """The KV memory of one worker. Paths use it from several threads; it is closed when all paths over it are."""

    @property
    def place(self) -> MemoryPlace: ...

    @property
    def load_depth(self) -> int:
        """How many stagings a loading thread should use in turn: several where copies go on by themselves."""
        ...

    def staging(self, size_bytes: int) -> Staging:
        """``size_bytes``: whole pages. Raises :class:`~meshfusion.jbof.errors.MediaError`."""
        ...

    def register(self, registrar: Registrar) -> RegisteredRegion:
        """All of it, so once for each registrar: offsets of a layout are offsets of the region.

        The region is the caller's to close. Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when there is no
        way that is known to be right, :class:`~meshfusion.jbof.errors.MediaError` when the system does not allow it.
        """
        ...

    def produced(self) -> Produced:
        """Now, in the work of the calling thread: called by the engine's thread when it has issued what fills blocks
        that are to be saved, or what used blocks that are to be loaded into.

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
        """Raises :class:`~meshfusion.jbof.nvme.memory.MemoryInUseError` while regions or stagings of it are open."""
        ...
