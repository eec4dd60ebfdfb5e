"""The staged way: units move between a namespace this machine can open and device memory, through aligned staging.

A loader reads with O_DIRECT into its own staging buffer, copies to the destination and digests what the destination
then holds (rule 4), many units in one pass without the GIL: a thread that needs the GIL after every unit waits for it
every time, milliseconds while the engine's own thread is busy in Python.

Staging is what makes a load abandonable at once: bytes that come late stay in our buffer, and memory the engine has
taken back is never written (rule 3's concern, on the host's side).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import numpy as np

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.host_memory import ALREADY_PRODUCED
from meshfusion.host.memory.kv_memory import Produced
from meshfusion.host.path.cpus import Cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, UnitFailure
from meshfusion.host.path.proof import IsDigestRight, outcomes_of
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.spans import Span
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import encode_chunk_header
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


def staged_path(
    data: DataFile,
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
    """It owns ``data``. ``read_bytes``: staging per load thread; ``write_bytes``: of the largest shard.

    ``is_digest_right`` exists for negative controls in tests: anything but equality is wrong.
    """
    unit_lbas = -(-layout.unit_bytes // lba_bytes)
    read_lbas = max(unit_lbas, read_bytes // lba_bytes)
    medium = StagedMedium(data, memory, layout, kernels, lba_bytes, read_lbas, write_bytes, is_digest_right)
    return DataPath(medium, unit_bytes=layout.unit_bytes, lba_bytes=lba_bytes, load_threads=load_threads, cpus=cpus)


@dataclass(frozen=True, slots=True)
class StagedMedium:
    """See :func:`staged_path`."""

    data: DataFile
    memory: Memory
    layout: GroupLayout
    kernels: DigestKernels
    lba_bytes: int
    read_lbas: int
    write_bytes: int
    is_digest_right: IsDigestRight

    def loader(self) -> StagedLoader:
        return StagedLoader(self)

    def saver(self) -> StagedSaver:
        return StagedSaver(self)

    def produced(self) -> Produced:
        return ALREADY_PRODUCED

    def interrupt(self, deadline_s: float) -> None:
        """A read or write of a file cannot be interrupted; its memory is ours."""

    def close(self) -> None:
        self.data.close()


class StagedLoader:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Loader`."""

    def __init__(self, medium: StagedMedium) -> None:
        self._medium = medium
        self._staging = AlignedBuffer(medium.read_lbas * medium.lba_bytes, huge_pages=True)
        self._staging.array[:] = 0  # its pages exist before the first load

    def load(self, job: LoadJob, span: Span) -> list[UnitFailure | None]:
        medium = self._medium
        units = job.units[span.first : span.first + span.unit_count]
        medium.data.read_into(span.lba, self._staging.view[: span.lba_count * medium.lba_bytes])
        run_offsets = medium.layout.run_offsets_of([unit.block_id for unit in units])
        if not job.enter():
            return list(job.refused(span.first, len(units)))
        try:
            digests = medium.kernels.scatter_and_digest_units(
                self._staging.array,
                0,
                span.stride_lbas * medium.lba_bytes,
                medium.memory,
                run_offsets,
                medium.layout.run_bytes,
            )
        finally:
            job.leave()
        return outcomes_of(units, span.first, digests, medium.is_digest_right)

    def close(self) -> None:
        self._staging.close()


class StagedSaver:
    """Keeps the contract of :class:`~meshfusion.host.path.medium.Saver`. The fate of every write is known."""

    def __init__(self, medium: StagedMedium) -> None:
        self._medium = medium
        self._staging = AlignedBuffer(medium.write_bytes, huge_pages=True)

    def write(self, shard: ShardWrite) -> tuple[bytes, ...]:
        medium = self._medium
        unit_bytes, lba_bytes = medium.layout.unit_bytes, medium.lba_bytes
        stride_bytes = -(-unit_bytes // lba_bytes) * lba_bytes
        total_bytes = shard.extent.lba_count * lba_bytes
        header_bytes = total_bytes - len(shard.block_ids) * stride_bytes
        digests = []
        for i, block_id in enumerate(shard.block_ids):
            offset = header_bytes + i * stride_bytes
            digest = medium.kernels.gather_and_digest(
                medium.memory,
                medium.layout.run_offsets(block_id),
                medium.layout.run_bytes,
                self._staging.array,
                offset,
            )
            self._staging.array[offset + unit_bytes : offset + stride_bytes] = 0
            digests.append(digest)
        header = encode_chunk_header(replace(shard.header, unit_digests=tuple(digests)), lba_bytes)
        assert len(header) == header_bytes, (len(header), header_bytes)
        self._staging.view[:header_bytes] = header
        medium.data.write_from(shard.extent.lba, self._staging.view[:total_bytes])
        return tuple(digests)

    def flush(self) -> None:
        self._medium.data.flush()

    def close(self) -> None:
        self._staging.close()
