"""One rank's part of a save order: which shards it writes, and what it reports when the last of them is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshfusion.dpu.api.tenant import CHUNK_TENANT
from meshfusion.dpu.api.types import Extent
from meshfusion.host.connector.vllm.messages import RunWritten, SaveOrder
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from meshfusion.jbof.format import ChunkHeader
from meshfusion.jbof.pool_addresses import pool_lba


class RunWrites:
    """Of the worker ``rank``. Granted chunks are counted from 0."""

    def __init__(self, order: SaveOrder, form: ChunkForm, rank: int) -> None:
        self.order: Final = order
        self._form = form
        self._rank = rank
        self._mine = [i for i, group in enumerate(order.groups) if form.is_writer(group, rank)]
        self._written: dict[int, ShardWritten] = {}

    @property
    def is_empty(self) -> bool:
        """Is all of it for other ranks to write?"""
        return not self._mine

    def shard_writes(self, pool_uuid: bytes) -> list[ShardWrite]:
        """One for each granted chunk that this rank has a shard of its own of."""
        order, granted = self.order, self.order.granted
        writes = []
        for i, (extent, first) in zip(self._mine, self._extents(), strict=True):
            group, index, block_ids = order.groups[i], order.indexes[i], order.block_ids[i]
            shard_count = self._form.shard_count(group)
            assert len(block_ids) == len(self._form.plans[group].kept_blocks(index)), (group, index, block_ids)
            header = ChunkHeader(
                pool_uuid=pool_uuid,
                identity=granted.identity,
                key=granted.keys[i],
                tenant=CHUNK_TENANT,
                group=group,
                rank=self._rank,
                shard_count=shard_count,
                position_tokens=index * self._form.chunk_tokens,
                token_count=self._form.chunk_tokens,
                segment=extent.segment,
                generation=extent.generation,
                lba=extent.lba,
                unit_bytes=self._form.unit_bytes[group],
                unit_digests=(),
                first_lba=pool_lba(first.namespace, first.lba) if shard_count > 1 else 0,
                first_generation=first.generation if shard_count > 1 else 0,
            )
            writes.append(ShardWrite((order.run_id, i), extent, header, block_ids))
        return writes

    def _extents(self) -> list[tuple[Extent, Extent]]:
        """Where they go, one for each of mine, and where the first shard of its chunk goes."""
        places = self.order.granted.extents
        extents, first_shard = [], 0
        for group in self.order.groups:
            if self._form.is_writer(group, self._rank):
                shard = first_shard + self._form.shard_at(group, self._rank)
                extents.append((Extent(*places[shard]), Extent(*places[first_shard])))
            first_shard += self._form.shard_count(group)
        assert first_shard == len(self.order.granted.extents), self.order
        return extents

    def written(self, shard: ShardWritten, path: str) -> RunWritten | None:
        """One is written, on ``path``. The report, when it was the last one."""
        run_id, number = shard.save_id
        assert run_id == self.order.run_id, shard
        assert number not in self._written, f"written twice: {shard}"
        self._written[number] = shard
        if len(self._written) < len(self._mine):
            return None
        shards = [self._written[i] for i in self._mine]
        reason = next((shard.reason for shard in shards if shard.reason), "")
        # Giving such a place back would free space that a late write may still hit (rule 3).
        in_doubt = tuple(i for i, shard in zip(self._mine, shards, strict=True) if shard.fate is WriteFate.UNKNOWN)
        descriptors = sum(shard.descriptors for shard in shards)
        return self._report([shard.unit_digests for shard in shards], reason, in_doubt, path, descriptors)

    def not_begun(self, reason: str = "") -> RunWritten:
        """The report when nothing is written, for ``reason`` or because it is empty."""
        return self._report([None] * len(self._mine), reason)

    def _report(
        self,
        mine: Sequence[tuple[bytes, ...] | None],
        reason: str,
        in_doubt: tuple[int, ...] = (),
        path: str = "",
        descriptors: int = 0,
    ) -> RunWritten:
        digests: list[tuple[bytes, ...] | None] = [()] * len(self.order.groups)
        for i, of_chunk in zip(self._mine, mine, strict=True):
            digests[i] = of_chunk
        return RunWritten(self.order.run_id, tuple(digests), reason, in_doubt, path, descriptors, self._rank)
