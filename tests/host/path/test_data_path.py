"""A path's threads, whatever becomes of what they move bytes with: nobody waits for ever, and the medium is closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from meshfusion.host.memory.host_memory import ALREADY_PRODUCED
from meshfusion.host.memory.kv_memory import Produced
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, LoadResult, UnitFailure, UnitRead
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.shards import ShardWrite, ShardWritten, WriteFate
from meshfusion.host.path.spans import Span
from meshfusion.jbof.errors import MediaError
from tests.host.support.shard_writes import shard_write
from tests.host.support.waiting import until

UNIT_BYTES = 4096
DIGESTS = (b"d" * 8,)


class Mover:
    """Loads and saves by doing nothing."""

    def load(self, job: LoadJob, span: Span) -> Sequence[UnitFailure | None]:
        return [None] * span.unit_count

    def write(self, shard: ShardWrite) -> tuple[bytes, ...]:
        return DIGESTS

    def flush(self) -> None: ...

    def close(self) -> None: ...


class RefusingMedium:
    """``error``: what making a mover raises, while it is set: memory cannot be registered, say."""

    read_lbas = 1
    save_depth = 1

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked = 0
        self.closed = threading.Event()

    def _mover(self) -> Mover:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return Mover()

    loader = saver = _mover

    def produced(self) -> Produced:
        return ALREADY_PRODUCED

    def interrupt(self, deadline_s: float) -> None: ...

    def close(self) -> None:
        self.closed.set()


def load(path: DataPath) -> LoadResult:
    job = path.load([UnitRead(0, UNIT_BYTES, 0, DIGESTS[0])], abandon_after_s=10.0)
    until(lambda: job.result(0.0) is not None)
    result = job.result(0.0)
    assert result is not None
    return result


def save(path: DataPath) -> ShardWritten:
    path.save([shard_write(UNIT_BYTES, [0], 1)])
    written: list[ShardWritten] = []

    def is_told() -> bool:
        written.extend(path.take_written())
        return bool(written)

    until(is_told)
    return written[0]


@pytest.mark.parametrize("error", [MediaError("no memory can be registered", next_step="-"), RuntimeError("no memory")])
def test_without_movers_everything_fails_at_once_until_there_are_some(error: Exception) -> None:
    medium = RefusingMedium(error)
    path = DataPath(
        medium, kind=PathKind.STAGED, unit_bytes=(UNIT_BYTES,), unit_runs=(3,), lba_bytes=4096, load_threads=1
    )
    until(lambda: medium.asked >= 2)
    (failure,) = load(path).failures
    assert "no memory" in failure.reason
    assert not failure.is_mismatch
    written = save(path)
    assert (written.fate, written.unit_digests) == (WriteFate.FAILED, None)
    assert "no memory" in written.reason
    medium.error = None
    loaded, saved = load(path), save(path)
    assert loaded.failures == ()
    assert saved.unit_digests == DIGESTS
    assert (loaded.path, loaded.descriptors, saved.descriptors) == ("staged", 3, 3), "a unit of three runs"
    assert path.close()
    assert medium.closed.is_set()


def test_a_path_that_is_closed_before_its_movers_were_made_closes_its_medium() -> None:
    medium = RefusingMedium(MediaError("the initiator is closed", next_step="-"))
    path = DataPath(
        medium, kind=PathKind.STAGED, unit_bytes=(UNIT_BYTES,), unit_runs=(3,), lba_bytes=4096, load_threads=2
    )
    assert path.close()
    assert medium.closed.wait(5), "the engine's memory stays registered"
