"""The child process that is killed while chunks are moved: ``path point shards``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from unittest.mock import patch

from meshfusion.dpu.chunk_mover import ChunkMover, MovingMedium
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.store.tidying import Move
from meshfusion.dpu.tidier import Tidier
from tests.dpu.pool_cases import Holder
from tests.dpu.test_tidier import KeepsSome

OPTIONS: Final = PoolOptions(free_fraction=0.5)
CHUNKS: Final = range(20)
KEPT: Final = (0, 1, 2)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class PartMover(ChunkMover):
    """Dies when ``count`` shards are written."""

    count = 3

    def _move_shard(self, *args: object) -> str:
        problem = super()._move_shard(*args)  # type: ignore[arg-type]
        self.count -= 1
        if not self.count:
            die()
        return problem


class WholeMover(ChunkMover):
    """Dies when all are flushed, and the index does not know."""

    def carry_out(self, moves: Sequence[Move], drives: Mapping[int, MovingMedium]) -> frozenset[bytes]:
        written = super().carry_out(moves, drives)
        assert len(written) == len(KEPT)
        die()
        return written


def _at_part_of_the_copy(pool: Pool) -> None:
    pool._parts.tidier._mover.__class__ = PartMover


def _at_the_copies_end(pool: Pool) -> None:
    pool._parts.tidier._mover.__class__ = WholeMover


def _before_giving_up(pool: Pool) -> None:
    pool._store.give_up = die  # type: ignore[method-assign,assignment]


def _after_giving_up(pool: Pool) -> None:
    pass


POINTS: Final[Mapping[str, Callable[[Pool], None]]] = {
    "part": _at_part_of_the_copy,
    "copied": _at_the_copies_end,
    "moved": _before_giving_up,
    "given up": _after_giving_up,
}


def _run(path: str, point: str, shards: str) -> None:
    Tidier.start = lambda _: None  # type: ignore[method-assign,assignment]
    with patch("meshfusion.dpu.pool_opening.make_curator", lambda policy, segments: KeepsSome(*KEPT)):
        pool = Pool.open(Path(path), OPTIONS)
    holder = Holder(pool)
    for i in CHUNKS:
        holder.put_shards(i, shards=int(shards))
    POINTS[point](pool)
    assert pool._parts.tidier.tidy_one()
    die()


if __name__ == "__main__":
    _run(*sys.argv[1:])
