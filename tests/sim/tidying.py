"""A segment is made ready and given up, a step at a time: what :class:`meshfusion.dpu.tidier.Tidier` does."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.tidying import Move
from meshfusion.jbof.pool_addresses import drive_of_segment, pool_lba
from meshfusion.jbof.segments import SegmentRecord
from tests.sim.medium import Medium, Token
from tests.sim.service import Service

COPY_FAILS = 0.1


class TidyRun:
    """Of one life of the service. ``absent``: drives that do not answer, whether the service has seen it or not.
    ``step``: what is done next; None while something is waited for."""

    def __init__(
        self,
        service: Service,
        medium: Medium,
        rng: random.Random,
        check_bytes: Callable[[api.ChunkRecord], None],
        absent: Collection[int],
        *,
        flushes: bool,
    ) -> None:
        self._service, self._medium, self._rng, self._flushes = service, medium, rng, flushes
        self._check_bytes, self._absent = check_bytes, absent
        self._record: SegmentRecord | None = None
        self._run = 0
        self.moves: tuple[Move, ...] = ()
        self._told: list[api.ChunkRecord] = []
        self._done: dict[bytes, bool] = {}  # what was copied, and whether rightly
        self.step: Callable[[float], None] | None = self._begin

    @property
    def is_idle(self) -> bool:
        return self._record is None

    def _begin(self, now_s: float) -> None:
        self._record = self._service.store.begin_tidying(now_s)
        if self._record is not None:
            self._run += 1
            self.step = self._plan

    def _plan(self, now_s: float) -> None:
        assert self._record is not None
        segment = self._record.segment
        chunks = [c for c in self._service.index.chunks.values() if any(s.extent.segment == segment for s in c.shards)]
        self.step = None
        self._service.submit(self._service.store.plan_moves(now_s, chunks), self._planned, self._plan_failed)

    def _planned(self, moves: tuple[Move, ...]) -> None:
        self.moves = moves
        self.step = self._copy

    def _plan_failed(self) -> None:
        self._service.submit(self._service.store.moved(()), lambda _: None)
        self._leave()

    def _copy(self, now_s: float) -> None:
        """One chunk for each call; then all are flushed and told."""
        left = [move for move in self.moves if move.before.key not in self._done]
        if left:
            self._done[left[0].before.key] = self._move(left[0])
            return
        flushed = {move.before.key for move in self.moves if not self._is_cut_off(move)}
        keys = [key for key, is_right in self._done.items() if is_right and key in flushed]
        self._told = [move.after for move in self.moves if move.before.key in keys]
        if self._flushes:
            self._medium.flush(self._absent)
        self.moves, self._done = (), {}
        self.step = None
        self._service.submit(self._service.store.moved(keys), self._moved, self._leave)

    def _moved(self, _: object) -> None:
        """Rule 1: what the index names is there, whatever loses power now."""
        for chunk in self._told:
            if self._service.index.chunks.get(chunk.key) == chunk:
                self._check_bytes(chunk)
        self.step = self._give_up

    def _give_up(self, now_s: float) -> None:
        self._service.submit(self._service.store.give_up(), lambda _: None)
        self._end()

    def _leave(self) -> None:
        self._service.store.leave_as_is()
        self._end()

    def _end(self) -> None:
        self._record, self.step = None, self._begin

    # ---- copying -------------------------------------------------------------------------------------------------

    def _is_cut_off(self, move: Move) -> bool:
        """What is asked of a drive on its way fails."""
        shards = (*move.before.shards, *move.after.shards)
        return any(drive_of_segment(shard.extent.segment) in self._absent for shard in shards)

    def _move(self, move: Move) -> bool:
        """Is it as it should be?"""
        if self._is_cut_off(move):
            return False
        tokens = [
            (pool_lba(after.extent.namespace, after.extent.lba) + offset, self._token(move, before, after, offset))
            for before, after in zip(move.before.shards, move.after.shards, strict=True)
            for offset in range(before.extent.lba_count)
        ]
        is_right = self._rng.random() >= COPY_FAILS and all(token is not None for _, token in tokens)
        for lba, token in tokens:
            if token is not None and (is_right or self._rng.random() < 0.5):
                self._medium.write(lba, token)
        return is_right

    def _token(self, move: Move, before: api.Shard, after: api.Shard, offset: int) -> Token | None:
        """What is written there; None when what lies at the old place is not what the index says."""
        found = self._medium.read(pool_lba(before.extent.namespace, before.extent.lba) + offset)
        chunk, extent = move.before, before.extent
        wanted = (chunk.key, chunk.identity, chunk.position_tokens, extent.segment, extent.generation)
        if found is None or found[:5] != wanted:
            return None
        name = f"move {self._service.store.epoch} {self._run}"
        return found._replace(segment=after.extent.segment, generation=after.extent.generation, grant_id=name)
