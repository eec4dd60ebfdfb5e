"""A load's outcome is told once nobody can write its memory any more, and never waited for."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from meshfusion.host.path.load_job import LoadJob, UnitFailure, UnitRead

UNITS = [UnitRead(lba=8 * i, unit_bytes=32_768, block_id=i, digest=b"d" * 8) for i in range(3)]


def test_nothing_is_told_while_somebody_writes() -> None:
    job = LoadJob(UNITS, deadline_s=10.0, now_s=0.0)
    assert job.enter()
    job.abandon("preempted")
    assert not job.enter(), "no writing begins any more"
    assert job.result(5.0) is None
    assert job.result(1e9) is None, "a deadline alone frees no memory (rule 3)"
    job.leave()
    result = job.result(5.0)
    assert result is not None
    assert [(f.index, f.reason) for f in result.failures] == [(i, "preempted") for i in range(3)]


def test_what_was_proven_before_its_end_counts() -> None:
    job = LoadJob(UNITS, deadline_s=10.0, now_s=0.0)
    assert job.enter()
    job.done(range(1), [None])
    assert job.result(10.0) is None
    job.done(range(1, 2), [None])  # it was being written when the time was over
    job.leave()
    result = job.result(10.0)
    assert result is not None
    assert [f.index for f in result.failures] == [2]
    job.done(range(2, 3), [None])
    assert job.result(11.0) == result, "told is told"


@given(
    st.lists(st.sampled_from(["enter", "leave", "abandon", "done", "late", "result"]), max_size=40),
)
def test_any_order(steps: list[str]) -> None:
    job = LoadJob(UNITS, deadline_s=10.0, now_s=0.0)
    writing, done, may_enter, told = 0, 0, True, None
    for step in steps:
        now_s = 1.0
        if step == "enter":
            assert job.enter() == (may_enter and done < len(UNITS))
            writing += may_enter and done < len(UNITS)
        elif step == "leave" and writing:
            job.leave()
            writing -= 1
        elif step == "abandon":
            job.abandon("given up")
            may_enter = False
        elif step == "done" and done < len(UNITS):
            job.done(range(done, done + 1), [None if done else UnitFailure(0, True, "other bytes")])
            done += 1
        elif step == "late":
            now_s = 10.0
        result = job.result(now_s)
        if told is not None:
            assert result == told
        elif result is not None:
            told = result
            assert writing == 0
            assert done == len(UNITS) or not may_enter or now_s >= job.deadline_s
            assert {f.index for f in result.failures} == {0} | set(range(done, len(UNITS)))
        may_enter = may_enter and (now_s < job.deadline_s or done == len(UNITS))


def test_a_unit_that_was_refused_is_not_taken_for_loaded_while_another_is_written() -> None:
    """The outcome is not told yet, so that what is said of the refused unit counts."""
    job = LoadJob(UNITS[:2], deadline_s=10.0, now_s=0.0)
    assert job.enter()
    assert job.result(10.0) is None
    assert not job.enter(), "its time is over"
    job.done(range(1, 2), job.refused(1, 1))
    job.done(range(1), [None])
    job.leave()
    result = job.result(10.1)
    assert result is not None
    assert [(f.index, f.is_mismatch, f.reason) for f in result.failures] == [
        (1, False, "abandoned: it ran over its time")
    ]
