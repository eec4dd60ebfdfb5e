"""Nothing is promised before a worker reaches the data, and that is waited for once."""

from __future__ import annotations

from meshfusion.dpu.api.types import Reached
from meshfusion.host.connector.path_gate import Gate, PathGate, PathState

OPEN, WAIT, CLOSED = Gate.OPEN, Gate.WAIT, Gate.CLOSED


def test_a_fresh_engine_waits_for_its_first_path() -> None:
    gate = PathGate(patience_s=5.0)
    assert (gate.look(100.0), gate.needs_steps(100.0)) == (WAIT, True), (
        "nothing was asked yet: however long ago it began"
    )
    gate.stepped(100.0)
    gate.stepped(104.0)
    assert gate.look(104.9) is WAIT
    assert (gate.look(105.0), gate.needs_steps(105.0)) == (CLOSED, False)
    gate.workers_told(PathState("one"))
    assert (gate.look(200.0), gate.needs_steps(200.0)) == (OPEN, False)


def test_what_workers_say_last_counts() -> None:
    gate = PathGate(patience_s=5.0)
    gate.stepped(0.0)
    gate.workers_told(PathState("one", "no RDMA device"))
    assert (gate.look(1.0), gate.needs_steps(1.0)) == (CLOSED, False)
    gate.workers_told(PathState("one"))
    assert gate.look(1.0) is OPEN
    gate.workers_told(PathState("two"))
    assert gate.look(1.0) is OPEN


def test_all_ranks_must_reach_the_data() -> None:
    gate = PathGate(3, patience_s=5.0)
    gate.stepped(0.0)
    gate.workers_told(PathState("one", rank=2))
    gate.workers_told(PathState("one", rank=0))
    assert (gate.look(1.0), gate.needs_steps(1.0)) == (WAIT, True)
    assert (gate.look(5.0), gate.needs_steps(5.0)) == (CLOSED, False)
    gate.workers_told(PathState("one", rank=1))
    assert (gate.look(6.0), gate.needs_steps(6.0)) == (OPEN, False)
    gate.workers_told(PathState("two", "no RDMA device", rank=1))
    assert gate.look(6.0) is CLOSED
    gate.workers_told(PathState("two", rank=0))
    assert gate.look(6.0) is CLOSED, "that was another"
    gate.workers_told(PathState("two", rank=1))
    assert gate.look(6.0) is OPEN


def test_what_all_ranks_reach_is_what_an_engine_reaches() -> None:
    gate = PathGate(2)
    gate.workers_told(PathState("one", rank=0, reached=Reached(4, (1, 2, 3))))
    assert gate.reached("one") is None, "the other rank has yet to say it"
    gate.workers_told(PathState("one", rank=1, reached=Reached(3, (2, 3, 4))))
    assert gate.reached("one") == Reached(3, (2, 3))
    assert gate.reached("two") is None
    gate.workers_told(PathState("two", rank=0, reached=Reached(5, (1,))))
    assert (gate.reached("one"), gate.reached("two")) == (None, None), "one rank is ahead"
    gate.workers_told(PathState("two", "no path", rank=1, reached=Reached(5, (1,))))
    assert gate.reached("two") is None


def test_who_opens_drives_itself_says_nothing_of_them() -> None:
    gate = PathGate()
    gate.workers_told(PathState("one"))
    assert gate.reached("one") is None


def test_one_rank_without_a_path_is_not_waited_for_by_others() -> None:
    gate = PathGate(2, patience_s=5.0)
    gate.stepped(0.0)
    gate.workers_told(PathState("one", "no RDMA device", rank=1))
    assert gate.look(1.0) is CLOSED
