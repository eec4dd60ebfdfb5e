"""The staged way: units move between a namespace this machine can open and KV memory, through aligned staging.

A loader reads with O_DIRECT into its own staging, has it copied to the destination and digested there (rule 4). On the
host's memory that is one pass of the processor; a device copies by itself, so a loader has several stagings and reads
into the next while the former are copied.

Staging is what makes a load abandonable: until its copy begins, bytes that come late stay in our buffer, and memory the
engine has taken back is never written (rule 3's concern, on the host's side). From there until the copy has ended its
blocks count as being written, whatever is abandoned meanwhile.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.memory.kv_memory import CopyLostError, KvMemory, Produced, Staging
from meshfusion.host.path.cpus import Cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.late_writes import fate_of_write
from meshfusion.host.path.load_job import LoadJob, UnitFailure, UnitRead
from meshfusion.host.path.medium_answers import failure_of
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.pool_data import PoolData, as_pool_data
from meshfusion.host.path.proof import IsDigestRight, outcomes_of
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.spans import Span
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.format import encode_chunk_header
from meshfusion.jbof.media.file import DataFile

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]

SAVE_TIMEOUT_S: Final = 30.0


def staged_path(
    data: DataFile | PoolData,
    memory: Memory,
    layout: GroupLayout,
    kernels: DigestKernels,
    *,
    lba_bytes: int,
    load_threads: int,
    read_bytes: int,
    write_bytes: int,
    cpus: Cpus | None = None,
    is_digest_right: IsDigestRight = operator.eq,
) -> DataPath:
    """:func:`staged_path_to` the host's ``memory``."""
    return staged_path_to(
        HostKvMemory(memory, kernels),
        data,
        (layout,),
        lba_bytes=lba_bytes,
        load_threads=load_threads,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        cpus=cpus,
        is_digest_right=is_digest_right,
    )


def staged_path_to(
    memory: KvMemory,
    data: DataFile | PoolData,
    layouts: Sequence[GroupLayout],
    *,
    lba_bytes: int,
    load_threads: int,
    read_bytes: int,
    write_bytes: int,
    cpus: Cpus | None = None,
    is_digest_right: IsDigestRight = operator.eq,
) -> DataPath:
    """It owns ``data``, not ``memory``, which is closed after it. ``layouts``: of each KV group.

    ``read_bytes``: staging per load thread, unless units are so large that each of its parts has to hold one;
    ``write_bytes``: of the largest shard. ``is_digest_right`` exists for negative controls in tests: anything but
    equality is wrong.
    """
    unit_bytes = [layout.unit_bytes for layout in layouts]
    part_lbas = max(-(-max(unit_bytes) // lba_bytes), read_bytes // memory.load_depth // lba_bytes)
    pool_data = as_pool_data(data)
    medium = StagedMedium(pool_data, memory, tuple(layouts), lba_bytes, part_lbas, write_bytes, is_digest_right)
    return DataPath(
        medium,
        kind=PathKind.STAGED,
        unit_bytes=unit_bytes,
        unit_runs=[layout.run_count for layout in layouts],
        lba_bytes=lba_bytes,
        load_threads=load_threads,
        cpus=cpus,
    )


@dataclass(frozen=True, slots=True)
class StagedMedium:
    """See :func:`staged_path_to`. ``part_lbas``: of one staging of a loader."""

    data: PoolData
    memory: KvMemory
    layouts: tuple[GroupLayout, ...]
    lba_bytes: int
    part_lbas: int
    write_bytes: int
    is_digest_right: IsDigestRight

    @property
    def read_lbas(self) -> int:
        return self.part_lbas * self.memory.load_depth

    @property
    def save_depth(self) -> int:
        """A device copies by itself, and what several copies at once do to it was not tried."""
        return 1 if self.memory.place.device else 2

    def loader(self) -> StagedLoader:
        return StagedLoader(self)

    def saver(self) -> StagedSaver:
        return StagedSaver(self)

    def produced(self) -> Produced:
        return self.memory.produced()

    def interrupt(self, deadline_s: float) -> None:
        """Neither a read or write of a file nor a copy can be interrupted; the staging is ours."""

    def close(self) -> None:
        self.data.close()


class _Part(NamedTuple):
    """Units of a span that go through one staging, in one read. ``first``: the number of the first unit in the span."""

    first: int
    units: tuple[UnitRead, ...]
    lba: int
    lba_count: int


class _Copy(NamedTuple):
    part: _Part
    staging: Staging


class StagedLoader:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Loader`."""

    def __init__(self, medium: StagedMedium) -> None:
        self._medium = medium
        self._stagings: list[Staging] = []
        try:
            for _ in range(medium.memory.load_depth):
                staging = medium.memory.staging(medium.part_lbas * medium.lba_bytes)
                self._stagings.append(staging)
                staging.buffer.array[:] = 0  # its pages exist before the first load
        except MeshFusionError:
            self.close()
            raise

    def load(self, job: LoadJob, span: Span) -> list[UnitFailure | None]:
        """Each part fails by itself. When it returns nobody writes the blocks any more."""
        outcomes: list[UnitFailure | None] = [None] * span.unit_count
        free, copying = deque(self._stagings), deque[_Copy]()

        def end_oldest() -> None:
            part, staging = copying.popleft()
            free.append(staging)
            outcomes[part.first : part.first + len(part.units)] = self._end(job, span, part, staging)

        try:
            for part in self._parts(job, span):
                if not free:
                    end_oldest()
                failures = self._begin(job, span, part, free[0])
                if failures is None:
                    copying.append(_Copy(part, free.popleft()))
                else:
                    outcomes[part.first : part.first + len(part.units)] = failures
        finally:
            while copying:
                end_oldest()
        return outcomes

    def _parts(self, job: LoadJob, span: Span) -> Iterator[_Part]:
        medium = self._medium
        unit_lbas = -(-medium.layouts[span.group].unit_bytes // medium.lba_bytes)
        count_max = 1 + (medium.part_lbas - unit_lbas) // span.stride_lbas
        for first in range(0, span.unit_count, count_max):
            count = min(count_max, span.unit_count - first)
            units = job.units[span.first + first : span.first + first + count]
            lba_count = (count - 1) * span.stride_lbas + unit_lbas
            yield _Part(first, units, span.lba + first * span.stride_lbas, lba_count)

    def _begin(self, job: LoadJob, span: Span, part: _Part, staging: Staging) -> Sequence[UnitFailure] | None:
        """Read, and begin to copy; or why not."""
        medium = self._medium
        try:
            data, lba = medium.data.at(part.lba)
            data.read_into(lba, staging.buffer.view[: part.lba_count * medium.lba_bytes])
            job.cleared.wait(max(0.0, job.deadline_s - time.monotonic()))
        except MeshFusionError as error:
            return _failures(span, part, error)
        layout = medium.layouts[span.group]
        run_offsets = layout.run_offsets_of([unit.block_id for unit in part.units])
        if not job.enter():
            return job.refused(span.first + part.first, len(part.units))
        try:
            staging.begin_load(span.stride_lbas * medium.lba_bytes, run_offsets, layout.run_bytes)
        except CopyLostError as error:
            return _failures(span, part, error)  # and never left: the blocks may be written at any time
        except MeshFusionError as error:
            job.leave()
            return _failures(span, part, error)
        except BaseException:
            job.leave()
            raise
        return None

    def _end(self, job: LoadJob, span: Span, part: _Part, staging: Staging) -> Sequence[UnitFailure | None]:
        """The proof, while the blocks are not yet anybody else's."""
        try:
            digests = staging.end_load()
        except CopyLostError as error:
            return _failures(span, part, error)
        except MeshFusionError as error:
            job.leave()
            return _failures(span, part, error)
        except BaseException:
            job.leave()
            raise
        job.leave()
        return outcomes_of(part.units, span.first + part.first, digests, self._medium.is_digest_right)

    def close(self) -> None:
        for staging in self._stagings:
            staging.close()


class StagedSaver:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Saver`."""

    def __init__(self, medium: StagedMedium) -> None:
        self._medium = medium
        self._staging = medium.memory.staging(medium.write_bytes)

    def write(self, shard: ShardWrite) -> tuple[bytes, ...]:
        medium, layout = self._medium, self._medium.layouts[shard.header.group]
        unit_bytes, lba_bytes = layout.unit_bytes, medium.lba_bytes
        stride_bytes = -(-unit_bytes // lba_bytes) * lba_bytes
        total_bytes = shard.extent.lba_count * lba_bytes
        header_bytes = total_bytes - len(shard.block_ids) * stride_bytes
        run_offsets = layout.run_offsets_of(shard.block_ids)
        shard.produced.wait(SAVE_TIMEOUT_S)
        digests = tuple(self._staging.save(header_bytes, stride_bytes, run_offsets, layout.run_bytes))
        buffer = self._staging.buffer
        for offset in range(header_bytes, total_bytes, stride_bytes):
            buffer.array[offset + unit_bytes : offset + stride_bytes] = 0
        header = encode_chunk_header(replace(shard.header, unit_digests=digests), lba_bytes)
        assert len(header) == header_bytes, (len(header), header_bytes)
        buffer.view[:header_bytes] = header
        data = medium.data.to_write(shard.extent.namespace)
        with fate_of_write(data):
            data.write_from(shard.extent.lba, buffer.view[:total_bytes])
        return digests

    def flush(self) -> None:
        self._medium.data.flush()

    def close(self) -> None:
        self._staging.close()


def _failures(span: Span, part: _Part, error: MeshFusionError) -> list[UnitFailure]:
    first = span.first + part.first
    return [failure_of(first + i, error) for i in range(len(part.units))]
