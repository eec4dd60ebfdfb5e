"""A small pool and a holder that really writes to it; also the child process that is killed while it commits."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import uuid
from pathlib import Path
from types import TracebackType

import numpy as np

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.format import ChunkHeader, encode_chunk_header
from meshfusion.jbof.label import Label
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DirectMode, open_data_file
from meshfusion.jbof.pool_addresses import pool_lba

SEGMENT_BYTES = 1 << 20
SEGMENT_COUNT = 6
SIZE_BYTES = (SEGMENT_COUNT + 1) << 20
UNIT_BYTES = 64 << 10
FULL_SEGMENT_UNITS = 15  # with the header block, no second chunk fits beside it
IDENTITY = b"I" * 32
DEADLINE_S = 20.0


def make_pool(path: Path, data_path: Path | None = None) -> Label:
    return create_pool(path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_path=data_path)


def key(i: int) -> bytes:
    return i.to_bytes(4, "big") * 8


class Holder:
    """Attached, with its liveness lock held."""

    def __init__(self, pool: api.ChunkService, holder_id: str | None = None, *, tenant: str = DEFAULT_TENANT) -> None:
        self.pool = pool
        incarnation = holder_id or uuid.uuid4().hex
        request = api.AttachRequest(incarnation, "vllm", "1", "h", os.getpid(), IDENTITY, 1, tenant)
        self.request = request
        self.attachment = pool.attach(request, deadline_s=DEADLINE_S)
        self.id = self.attachment.holder_id
        self.lock = hold_liveness(Path(self.attachment.liveness_path))
        self.kernels = load_kernels(UNIT_BYTES)

    def reserve(self, i: int, units: int = 3, shards: int = 1) -> api.ReserveResult:
        sizes = tuple(api.ShardSize(rank, UNIT_BYTES, units) for rank in range(shards))
        item = api.ReserveItem(key(i), 0, 16 * i, 16, sizes)
        request = api.ReserveRequest(self.id, self.attachment.epoch, (item,))
        return self.pool.reserve(request, deadline_s=DEADLINE_S).results[0]

    def write(self, i: int, result: api.ReserveResult, rank: int = 0, seed: int = 0) -> tuple[bytes, ...]:
        """Fill a shard's extent with a true header and random units; returns the digests, after the flush."""
        extent, first, shard_count = result.extents[rank], result.extents[0], len(result.extents)
        with AlignedBuffer(extent.lba_count * 4096) as buffer:
            units = (extent.lba_count - 1) * 4096 // UNIT_BYTES
            rng = np.random.default_rng((i, rank, seed))
            buffer.array[4096:] = rng.integers(0, 256, len(buffer.array) - 4096, dtype=np.uint8)
            starts = [np.array([4096 + unit * UNIT_BYTES], dtype=np.int64) for unit in range(units)]
            digests = tuple(self.kernels.digest_runs(buffer.array, start, UNIT_BYTES) for start in starts)
            header = ChunkHeader(
                pool_uuid=uuid.UUID(self.attachment.pool_uuid).bytes,
                identity=IDENTITY,
                key=key(i),
                tenant="default",
                group=0,
                rank=rank,
                shard_count=shard_count,
                position_tokens=16 * i,
                token_count=16,
                segment=extent.segment,
                generation=extent.generation,
                lba=extent.lba,
                unit_bytes=UNIT_BYTES,
                unit_digests=digests,
                first_lba=pool_lba(first.namespace, first.lba) if shard_count > 1 else 0,
                first_generation=first.generation if shard_count > 1 else 0,
            )
            buffer.view[:4096] = encode_chunk_header(header)
            path = Path(next(n.path for n in self.attachment.namespaces if n.nsid == extent.namespace))
            with open_data_file(path, writable=True, direct=DirectMode.OFF) as data:
                data.write_from(extent.lba, buffer.view)
                data.flush()
        return digests

    def commit(self, result: api.ReserveResult, *digests: tuple[bytes, ...]) -> bool:
        """``digests``: of each shard."""
        item = api.CommitItem(result.grant_id, digests)
        request = api.CommitRequest(self.id, self.attachment.epoch, (item,))
        return self.pool.commit(request, deadline_s=DEADLINE_S).committed[0]

    def put(self, i: int, units: int = 3) -> bool:
        result = self.reserve(i, units)
        return result.outcome is api.ReserveOutcome.GRANTED and self.commit(result, self.write(i, result))

    def put_shards(self, i: int, units: int = 3, shards: int = 2) -> tuple[api.Extent, ...]:
        """The same for a chunk of several shards; where they lie."""
        result = self.reserve(i, units, shards)
        assert result.outcome is api.ReserveOutcome.GRANTED, result
        assert self.commit(result, *(self.write(i, result, rank) for rank in range(shards)))
        return result.extents

    def match(self, *chunks: int) -> api.MatchReply:
        group = api.GroupKeys(0, tuple(key(i) for i in chunks), (0,) * len(chunks))
        request = api.MatchRequest(self.id, "r", 16, (group,))
        return self.pool.match(request, deadline_s=DEADLINE_S)

    def match_alone(self, i: int) -> api.MatchReply:
        """Of chunk ``i``, as if nothing before it were needed."""
        group = api.GroupKeys(0, (b"",) * i + (key(i),), (*range(1, i + 1), i))
        reply = self.pool.match(api.MatchRequest(self.id, "r", 16, (group,)), deadline_s=DEADLINE_S)
        self.pool.release(api.ReleaseRequest(self.id, (reply.lease_id,)), deadline_s=DEADLINE_S)
        return reply

    def ask_again(self) -> None:
        """As an engine does when a heartbeat tells that the drives are reached in another way."""
        self.attachment = self.pool.attach(self.request, deadline_s=DEADLINE_S)

    def release(self, reply: api.MatchReply) -> None:
        self.pool.release(api.ReleaseRequest(self.id, (reply.lease_id,)), deadline_s=DEADLINE_S)

    def leave(self) -> None:
        os.close(self.lock)
        self.pool.detach(api.DetachRequest(self.id), deadline_s=DEADLINE_S)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.leave()


def _commit_until_killed(path: str, seed: str) -> None:
    rng = random.Random(int(seed))
    with Pool.open(Path(path)) as pool, contextlib.ExitStack() as stack:
        holders = [stack.enter_context(Holder(pool)) for _ in range(2)]
        print("ready", flush=True)
        while True:
            holder, i = rng.choice(holders), rng.randrange(40)
            result = holder.reserve(i, units=rng.choice((1, 3, 7)))
            if result.outcome is api.ReserveOutcome.GRANTED:
                digests = holder.write(i, result)
                if rng.random() < 0.9:
                    holder.commit(result, digests)
                else:
                    request = api.AbortRequest(holder.id, holder.attachment.epoch, (result.grant_id,))
                    pool.abort(request, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    _commit_until_killed(*sys.argv[1:])
