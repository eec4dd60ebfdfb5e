"""When a pool counts as stuck: as a state machine, and with a real writer."""

from __future__ import annotations

import threading

from meshfusion.dpu.pool_writer import TransactionWriter
from meshfusion.dpu.progress import Progress, ProgressWatch
from meshfusion.dpu.store.effects import DeleteChunk
from meshfusion.jbof.errors import MeshFusionError
from tests.dpu.pool_cases import key


def test_an_idle_writer_is_never_stuck() -> None:
    watch = ProgressWatch(10.0)
    assert [watch.problem(now_s, Progress(5, 5)) for now_s in (0.0, 100.0, 1e6)] == [""] * 3


def test_a_writer_that_has_work_and_settles_nothing_is_stuck_after_its_time() -> None:
    watch = ProgressWatch(10.0)
    assert watch.problem(0.0, Progress(5, 5)) == ""
    assert watch.problem(100.0, Progress(6, 5)) == "", "what waits has come since the last look"
    assert watch.problem(110.0, Progress(9, 5)) == "", "more work is no progress, and its time is not over yet"
    assert watch.problem(111.0, Progress(9, 5)) == "the index settles nothing since 11 s"
    assert watch.problem(112.0, Progress(9, 6)) == "", "one is settled"
    assert watch.problem(122.0, Progress(9, 6)) == ""
    assert watch.problem(122.5, Progress(9, 6)) != ""


def test_a_slow_writer_is_not_stuck() -> None:
    watch = ProgressWatch(10.0)
    assert all(watch.problem(9.0 * i, Progress(1000, i)) == "" for i in range(50))


def test_a_lock_that_cannot_be_had_is_a_problem_at_once() -> None:
    watch = ProgressWatch(10.0)
    assert watch.problem(0.0, None) == "the pool's lock cannot be had"
    assert watch.problem(1.0, Progress(0, 0)) == ""


def test_a_first_look_at_work_gives_it_its_time() -> None:
    watch = ProgressWatch(10.0)
    assert watch.problem(500.0, Progress(6, 5)) == ""
    assert watch.problem(511.0, Progress(6, 5)) != ""


def test_the_writer_tells_how_far_it_is() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Index:
        def chunks_in(self, record: object) -> None:
            return None

        def apply(self, effects: object) -> None:
            inside.set()
            assert go_on.wait(10.0)

    class Medium:
        def write_summaries(self, summaries: object) -> None: ...

        def open_segments(self, records: object) -> None: ...

    def settle(ticket: int, error: MeshFusionError | None) -> None: ...

    writer = TransactionWriter(Index(), Medium(), settle)
    assert writer.progress == Progress(0, 0)
    writer.submit(3, (DeleteChunk(key(1), None),))  # type: ignore[arg-type]
    assert inside.wait(10.0)
    assert writer.progress == Progress(3, 0)
    go_on.set()
    writer.wait(3, 10.0)
    assert writer.progress == Progress(3, 3)
    writer.close()
