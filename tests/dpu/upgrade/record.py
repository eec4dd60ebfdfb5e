"""Record a small pool as this version of the code makes it: ``python tests/dpu/upgrade/record.py NAME``.

To be run with the code of a release, before formats change; the outcome, ``NAME.tar.xz`` and ``NAME.json`` beside this
file, is committed and never made anew. The pool's service is killed: with a holder that was attached, a chunk that was
granted, written and not committed, and segments that are open. Chunks' bytes are patterns, so that little is left of
them when they are compressed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.pool import Pool, create_pool
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.format import ChunkHeader, encode_chunk_header, header_lba_count, unit_lba_count

HERE = Path(__file__).resolve().parent
SEGMENT_BYTES = 1 << 20
SIZE_BYTES = 7 << 20
UNIT_BYTES, UNIT_COUNT = 64 << 10, 3
COMMITTED, UNCOMMITTED = tuple(range(6)), 6
CHUNK_TOKENS = 16
IDENTITY = bytes(range(32))
DEADLINE_S = 20.0


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def unit(number: int, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of one unit of chunk ``number``: 64 times 1 KiB."""
    pattern = (np.arange(1024, dtype=np.uint32) * (2 * number + 1) + 7 * index).astype(np.uint8)
    return np.tile(pattern, UNIT_BYTES // 1024)


def save(pool: Pool, holder: api.Attachment, number: int, *, commits: bool) -> tuple[bytes, ...]:
    """As an engine does it; returns the digests of its units."""
    item = api.ReserveItem(
        key(number), 0, CHUNK_TOKENS * number, CHUNK_TOKENS, (api.ShardSize(0, UNIT_BYTES, UNIT_COUNT),)
    )
    reserved = pool.reserve(api.ReserveRequest(holder.holder_id, holder.epoch, (item,)), deadline_s=DEADLINE_S)
    (place,) = reserved.results
    (extent,) = place.extents
    kernels = load_kernels(UNIT_BYTES)
    units = [unit(number, index) for index in range(UNIT_COUNT)]
    digests = tuple(kernels.digest_runs(one, np.zeros(1, np.int64), UNIT_BYTES) for one in units)
    header = ChunkHeader(
        pool_uuid=uuid.UUID(holder.pool_uuid).bytes,
        identity=IDENTITY,
        key=key(number),
        tenant="default",
        group=0,
        rank=0,
        shard_count=1,
        position_tokens=CHUNK_TOKENS * number,
        token_count=CHUNK_TOKENS,
        segment=extent.segment,
        generation=extent.generation,
        lba=extent.lba,
        unit_bytes=UNIT_BYTES,
        unit_digests=digests,
    )
    (namespace,) = holder.namespaces
    with open(namespace.path, "r+b") as data:
        data.seek(extent.lba * namespace.lba_bytes)
        data.write(encode_chunk_header(header))
        for index, one in enumerate(units):
            lba = extent.lba + header_lba_count(UNIT_COUNT) + index * unit_lba_count(UNIT_BYTES)
            data.seek(lba * namespace.lba_bytes)
            data.write(one.tobytes())
        data.flush()
        os.fsync(data.fileno())
    if commits:
        commit = api.CommitRequest(holder.holder_id, holder.epoch, (api.CommitItem(place.grant_id, (digests,)),))
        assert pool.commit(commit, deadline_s=DEADLINE_S).committed == (True,)
    return digests


def live_and_die(directory: Path) -> None:
    """What a service does that is killed in the midst of it; prints what is to be found again."""
    create_pool(directory, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    pool = Pool.open(directory)
    holder = pool.attach(
        api.AttachRequest(uuid.uuid4().hex, "vllm", "0.32.0", "host", os.getpid(), IDENTITY, 1), deadline_s=DEADLINE_S
    )
    hold_liveness(Path(holder.liveness_path))
    found = {key(number).hex(): [d.hex() for d in save(pool, holder, number, commits=True)] for number in COMMITTED}
    save(pool, holder, UNCOMMITTED, commits=False)
    fields = {"pool_uuid": pool.pool_uuid, "epoch": holder.epoch, "holder_id": holder.holder_id, "chunks": found}
    print(json.dumps(fields), flush=True)
    os._exit(9)


def record(name: str) -> None:
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work, "pool")
        child = subprocess.run([sys.executable, __file__, "--child", str(directory)], stdout=subprocess.PIPE, text=True)
        assert child.returncode == 9, child.returncode
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(directory.rglob("*")):
                entry = archive.gettarinfo(path, str(path.relative_to(directory)))
                entry.uid = entry.gid = entry.mtime = 0
                entry.uname = entry.gname = ""
                if entry.isreg():
                    with path.open("rb") as data:
                        archive.addfile(entry, data)
                else:
                    archive.addfile(entry)
        (HERE / f"{name}.json").write_text(json.dumps(json.loads(child.stdout), indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        live_and_die(Path(sys.argv[2]))
    else:
        record(sys.argv[1])
