"""The direct way: NVMe commands whose data is the engine's own KV memory, moved by the target's RDMA engine.

Nothing is staged and no byte passes this host's processors, except for the proof: a loader digests what the
destination holds when its reads have ended (rule 4).

A read that is under way cannot be called back. So memory counts as being written (``LoadJob.enter``) from before the
first command until the initiator says that nobody can reach it any more: the commands ended, or their queue pair is
dead (rule 3, on the host's side). What happens to a write that is in doubt is the target's to say.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.kv_memory import KvMemory, Produced, Registrar
from meshfusion.host.path.cpus import Cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, UnitFailure, UnitRead
from meshfusion.host.path.medium import WriteInDoubtError
from meshfusion.host.path.medium_answers import failure_of
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.proof import IsDigestRight, outcomes_of
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.spans import Span
from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.format import encode_chunk_header, header_lba_count
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.nvme.memory import RegionPart, RegisteredRegion
from meshfusion.jbof.nvme.pending import FateUnknownError, PendingTransfer
from meshfusion.jbof.pool_addresses import pool_lba, split_pool_lba

logger = logging.getLogger("meshfusion.path")

SAVE_TIMEOUT_S: Final = 30.0
_ALARM_S: Final = 10.0


class NamespaceInitiator(Registrar, Protocol):
    """What is used of :class:`~meshfusion.jbof.nvme.initiator.Initiator`."""

    @property
    def max_descriptors(self) -> int:
        """Pieces of memory that one command may have."""
        ...

    def begin_read(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer: ...

    def begin_write(
        self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float
    ) -> PendingTransfer: ...

    def flush(self, nsid: int, *, timeout_s: float) -> None: ...

    def close(self, *, timeout_s: float) -> None: ...


def rdma_path(
    initiator: NamespaceInitiator,
    nsids: Collection[int],
    memory: KvMemory,
    layouts: Sequence[GroupLayout],
    *,
    lba_bytes: int,
    load_threads: int,
    read_bytes: int,
    max_units: int,
    cpus: Cpus | None = None,
    is_digest_right: IsDigestRight = operator.eq,
    take_key: Callable[[str], None] = lambda _text: None,
) -> DataPath:
    """It owns ``initiator``, not ``memory``, which is closed after it. ``nsids``: of the pool's drives, which were
    proven to be these; what lies on others fails. They may change as drives come and go. ``layouts``: of each KV group.

    ``read_bytes``: what a load thread has under way; ``max_units``: of the largest shard. ``take_key``: as
    :class:`~meshfusion.host.path.data_path.DataPath`'s.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` when the target cannot take commands for this layout, and
    what registering ``memory`` raises. The initiator is closed then.
    """
    try:
        for layout in layouts:
            check_layout(layout, lba_bytes, initiator.max_descriptors)
        medium = RdmaMedium(initiator, nsids, memory, tuple(layouts), lba_bytes, read_bytes, max_units, is_digest_right)
    except MeshFusionError:
        initiator.close(timeout_s=0.0)
        raise
    unit_bytes = [layout.unit_bytes for layout in layouts]
    return DataPath(
        medium,
        kind=PathKind.RDMA,
        unit_bytes=unit_bytes,
        unit_runs=[layout.run_count for layout in layouts],
        lba_bytes=lba_bytes,
        load_threads=load_threads,
        cpus=cpus,
        take_key=take_key,
    )


def check_layout(layout: GroupLayout, lba_bytes: int, max_descriptors: int) -> None:
    """Can commands with ``max_descriptors`` pieces of memory move this layout's units?"""
    is_aligned = layout.run_bytes % lba_bytes == 0
    if is_aligned or max_descriptors > 1:
        return
    raise UnsupportedError(
        f"the KV layout has runs of {layout.run_bytes} bytes, not whole blocks of {lba_bytes}, and commands have one "
        "piece of memory: the target takes no more, or key_scope is command",
        next_step="Use the staged path, a target that takes SGL lists (SPDK) with key_scope: region, or a larger "
        "engine block size.",
    )


class RdmaMedium:
    """See :func:`rdma_path`."""

    def __init__(
        self,
        initiator: NamespaceInitiator,
        nsids: Collection[int],
        memory: KvMemory,
        layouts: tuple[GroupLayout, ...],
        lba_bytes: int,
        read_bytes: int,
        max_units: int,
        is_digest_right: IsDigestRight,
    ) -> None:
        self.initiator = initiator
        self.nsids = nsids
        self.memory = memory
        self.layouts = layouts
        self.lba_bytes = lba_bytes
        self.max_units = max_units
        self.is_digest_right = is_digest_right
        unit_lbas = [-(-layout.unit_bytes // lba_bytes) for layout in layouts]
        self.read_lbas = max(*unit_lbas, read_bytes // lba_bytes)
        self.save_depth = 1
        self._slack_bytes = [
            count * lba_bytes - layout.unit_bytes for count, layout in zip(unit_lbas, layouts, strict=True)
        ]
        # What a unit's last block holds behind it: read to nowhere, written as zeros.
        self._sink = _buffer_region(initiator, AlignedBuffer(lba_bytes)) if any(self._slack_bytes) else None
        self._zeros = _buffer_region(initiator, AlignedBuffer(lba_bytes)) if any(self._slack_bytes) else None
        self._region = memory.register(initiator)  # last: nothing may fail from here on and leave it open

    def place_of(self, address: int) -> tuple[int, int]:
        """(NSID, LBA in it) of a pool LBA. Raises :class:`~meshfusion.jbof.errors.MediaError` for a drive that is not
        reached."""
        nsid, lba = split_pool_lba(address)
        if nsid not in self.nsids:
            raise MediaError(
                f"drive {nsid - 1} of the pool is not reached here",
                next_step="look for why in the log of the engine's start; restart the engine when the drive is back",
            )
        return nsid, lba

    def parts_to_read(self, group: int, block_id: int) -> list[RegionPart]:
        return self._parts(group, block_id, self._sink)

    def parts_to_write(self, group: int, block_id: int) -> list[RegionPart]:
        return self._parts(group, block_id, self._zeros)

    def _parts(self, group: int, block_id: int, slack: RegisteredRegion | None) -> list[RegionPart]:
        """A unit's memory in canonical order, whole blocks in all."""
        layout, slack_bytes = self.layouts[group], self._slack_bytes[group]
        parts = [self._region.part(int(offset), layout.run_bytes) for offset in layout.run_offsets(block_id)]
        if slack_bytes:
            assert slack is not None
            parts.append(slack.part(0, slack_bytes))
        return parts

    def loader(self) -> RdmaLoader:
        return RdmaLoader(self)

    def saver(self) -> RdmaSaver:
        return RdmaSaver(self)

    def produced(self) -> Produced:
        return self.memory.produced()

    def interrupt(self, deadline_s: float) -> None:
        """Ends what is under way, and every queue pair, so that loaders and savers that wait go on."""
        try:
            self.initiator.close(timeout_s=max(0.0, deadline_s - time.monotonic()) / 2)
        except MeshFusionError:
            logger.exception("queue pairs are left that may still reach the engine's memory")

    def close(self) -> None:
        """The regions went with the initiator; that of the KV memory is not left to it, whoever the initiator is."""
        try:
            self._region.close()
        except MeshFusionError:
            logger.exception("the engine's memory stays registered until the initiator is closed")


class RdmaLoader:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Loader`."""

    def __init__(self, medium: RdmaMedium) -> None:
        self._medium = medium

    def load(self, job: LoadJob, span: Span) -> list[UnitFailure | None]:
        """Each unit with commands of its own: what lies between units of a span is not read."""
        units = job.units[span.first : span.first + span.unit_count]
        self._medium.place_of(span.lba)  # a span is one drive's
        job.cleared.wait(max(0.0, job.deadline_s - time.monotonic()))
        if not job.enter():
            return list(job.refused(span.first, len(units)))
        try:
            errors = self._read(units, job.deadline_s)
            digests = self._digests(span.group, units, errors)
        finally:
            job.leave()
        proven = outcomes_of(units, span.first, digests, self._medium.is_digest_right)
        return [
            outcome if error is None else failure_of(span.first + i, error)
            for i, (error, outcome) in enumerate(zip(errors, proven, strict=True))
        ]

    def _read(self, units: Sequence[UnitRead], deadline_s: float) -> list[MeshFusionError | None]:
        """When it returns nobody writes the blocks any more, and what was written there can be seen, wrong or right."""
        medium = self._medium
        transfers: list[PendingTransfer] = []
        try:
            for unit in units:
                timeout_s = max(0.001, deadline_s - time.monotonic())
                nsid, lba = medium.place_of(unit.lba)
                parts = medium.parts_to_read(unit.group, unit.block_id)
                transfers.append(medium.initiator.begin_read(nsid, lba, parts, timeout_s=timeout_s))
            return [_error_of(transfer) for transfer in transfers]
        finally:
            _wait_memory_free(transfers)
            medium.memory.arrived()

    def _digests(self, group: int, units: Sequence[UnitRead], errors: Sequence[MeshFusionError | None]) -> list[bytes]:
        """Empty for those that failed."""
        medium = self._medium
        read = [unit.block_id for unit, error in zip(units, errors, strict=True) if error is None]
        found = iter(medium.memory.digests(medium.layouts[group], read))
        return [next(found) if error is None else b"" for error in errors]

    def close(self) -> None: ...


class RdmaSaver:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Saver`."""

    def __init__(self, medium: RdmaMedium) -> None:
        self._medium = medium
        self._header = AlignedBuffer(header_lba_count(medium.max_units, medium.lba_bytes) * medium.lba_bytes)
        self._header_region = _buffer_region(medium.initiator, self._header)
        self._unflushed: set[int] = set()  # NSIDs

    def write(self, shard: ShardWrite) -> tuple[bytes, ...]:
        medium = self._medium
        nsid, lba = medium.place_of(pool_lba(shard.extent.namespace, shard.extent.lba))
        shard.produced.wait(SAVE_TIMEOUT_S)
        digests = tuple(medium.memory.digests(medium.layouts[shard.header.group], shard.block_ids))
        header = encode_chunk_header(replace(shard.header, unit_digests=digests), medium.lba_bytes)
        self._header.view[: len(header)] = header
        memory = [self._header_region.part(0, len(header))]
        for block_id in shard.block_ids:
            memory += medium.parts_to_write(shard.header.group, block_id)
        length_bytes = sum(part.length_bytes for part in memory)
        assert length_bytes == shard.extent.lba_count * medium.lba_bytes, (length_bytes, shard.extent)
        self._unflushed.add(nsid)
        transfer = medium.initiator.begin_write(nsid, lba, memory, timeout_s=SAVE_TIMEOUT_S)
        error = _error_of(transfer)
        if isinstance(error, FateUnknownError):
            raise WriteInDoubtError(error.message, next_step=error.next_step) from error
        if error is not None:
            raise error
        return digests

    def flush(self) -> None:
        """Every drive that was written to since it was last flushed (rule 1)."""
        for nsid in sorted(self._unflushed):
            self._medium.initiator.flush(nsid, timeout_s=SAVE_TIMEOUT_S)
            self._unflushed.discard(nsid)

    def close(self) -> None: ...


def _buffer_region(initiator: NamespaceInitiator, buffer: AlignedBuffer) -> RegisteredRegion:
    array = buffer.array
    return initiator.register_address(array.ctypes.data, array.nbytes, writable=True, owner=array)


def _error_of(transfer: PendingTransfer) -> MeshFusionError | None:
    """When it has ended, and nobody can reach its memory any more."""
    try:
        transfer.wait()
    except MeshFusionError as error:
        _wait_memory_free([transfer])
        return error
    return None


def _wait_memory_free(transfers: Iterable[PendingTransfer]) -> None:
    """However long it takes: no time that passes makes it safe (rule 3)."""
    for transfer in transfers:
        while not transfer.wait_memory_free(_ALARM_S):
            logger.error("a queue pair does not end: blocks of the engine are kept from use until it does")
