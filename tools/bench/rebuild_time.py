"""How long it takes to rebuild a pool's index from its drive: ``python -m meshfusion.tools.bench.rebuild_time``.

Makes a pool whose segments are full of chunks, with summaries and then without, and rebuilds its index. All lies in a
temporary folder of ``--directory``. Settled segments cost one read for each chunk and two for the segment, so their
time per TiB follows from the chunks' size; a segment that was open is read as a whole, so its time follows from the
drive's rate. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from meshfusion.dpu.api.types import ChunkRecord, Extent, Shard
from meshfusion.dpu.pool_create import create_pool
from meshfusion.dpu.pool_dir import PoolLayout, geometry_of
from meshfusion.dpu.pool_medium import FileMedium, PoolMedium
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.jbof.format import LBA_BYTES, ChunkHeader, encode_chunk_header, header_lba_count, shard_lba_count
from meshfusion.jbof.label import Label
from meshfusion.jbof.segment_format import SEGMENT_HEADER_LBAS, summary_lba_count
from meshfusion.jbof.segments import SegmentGeometry, SegmentRecord
from meshfusion.jbof.unit_digests import UnitDigests
from meshfusion.tools.bench.machine import machine_facts

_TIB = 1 << 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--segment-mib", type=int, default=64)
    parser.add_argument("--unit-kib", type=int, default=256)
    parser.add_argument("--units", type=int, default=4, help="of a chunk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        path = Path(folder) / "pool"
        label = create_pool(path, size_bytes=options.size_mib << 20, segment_bytes=options.segment_mib << 20)
        filler = _Filler(path, label, options.unit_kib << 10, options.units)
        print(
            json.dumps(
                {
                    "machine": machine_facts(Path(folder)),
                    "chunk_bytes": options.units * options.unit_kib << 10,
                    "segment_bytes": options.segment_mib << 20,
                    "with_summaries": _measured(path, filler.fill(generation=1, has_summaries=True), label),
                    "scanned": _measured(path, filler.fill(generation=2, has_summaries=False), label),
                }
            )
        )


def _measured(path: Path, chunk_count: int, label: Label) -> dict[str, float]:
    began_s = time.monotonic()
    rebuilt = rebuild_index(path)
    seconds = time.monotonic() - began_s
    assert rebuilt.report.chunks_found == chunk_count, (rebuilt, chunk_count)
    read_bytes = rebuilt.blocks_read * LBA_BYTES
    return {
        "chunks": chunk_count,
        "reads": rebuilt.reads,
        "read_bytes": read_bytes,
        "seconds": seconds,
        "seconds_per_tib_of_pool": seconds * _TIB / geometry_of(label).capacity_bytes,
        "gb_per_s_read": read_bytes / seconds / 1e9,
    }


class _Filler:
    """Every segment full of chunks of zeros."""

    def __init__(self, path: Path, label: Label, unit_bytes: int, unit_count: int) -> None:
        self._path, self._label, self._geometry = path, label, geometry_of(label)
        self._unit_bytes = unit_bytes
        self._digests = (UnitDigests().digest_of(bytes(unit_bytes)),) * unit_count
        self._lba_count = shard_lba_count(unit_bytes, unit_count)

    def fill(self, *, generation: int, has_summaries: bool) -> int:
        """Returns how many chunks there are."""
        file = FileMedium.open(PoolLayout(self._path).data)
        try:
            medium = PoolMedium(file, self._label, self._geometry, epoch=generation)
            count = 0
            for segment in range(self._geometry.segment_count):
                record = SegmentRecord(segment, generation, generation * self._geometry.segment_count + segment)
                medium.open_segments([record])
                chunks = []
                for lba in _places(self._geometry, segment, self._lba_count):
                    header = self._header(segment, generation, lba)
                    units = b"" if has_summaries else bytes(len(self._digests) * self._unit_bytes)  # then not looked at
                    file.write_blocks(lba, encode_chunk_header(header) + units)
                    chunks.append(self._record(header))
                count += len(chunks)
                if has_summaries:
                    medium.write_summaries([(record, chunks)])
            file.flush()
            return count
        finally:
            file.close()

    def _header(self, segment: int, generation: int, lba: int) -> ChunkHeader:
        key = uuid.uuid4().bytes * 2
        unit_bytes, digests = self._unit_bytes, self._digests
        pool_uuid = self._label.pool_uuid
        return ChunkHeader(
            pool_uuid, bytes(32), key, "default", 0, 0, 1, 0, 16, segment, generation, lba, unit_bytes, digests
        )

    def _record(self, header: ChunkHeader) -> ChunkRecord:
        extent = Extent(1, header.segment, header.lba, self._lba_count, header.generation)
        payload_lba_offset = header_lba_count(header.unit_count)
        shard = Shard(0, extent, payload_lba_offset, header.unit_bytes // LBA_BYTES, header.unit_bytes, self._digests)
        return ChunkRecord(header.key, header.identity, header.tenant, 0, 0, 16, (shard,))


def _places(geometry: SegmentGeometry, segment: int, lba_count: int) -> Iterator[int]:
    lba, count = geometry.first_lba(segment) + SEGMENT_HEADER_LBAS, 0
    while lba + lba_count + summary_lba_count(count + 1) <= geometry.end_lba(segment):
        yield lba
        lba += lba_count
        count += 1


if __name__ == "__main__":
    main()
