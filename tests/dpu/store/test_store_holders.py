"""Who may write: admission, silence, fences, epochs (rule 3)."""

from __future__ import annotations

from typing import Any

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.types import ReserveOutcome as Outcome
from meshfusion.jbof.errors import StaleHolderError, UnsupportedError
from tests.dpu.store.driver import Driver, item


@pytest.fixture
def pool() -> Driver:
    driver = Driver()
    driver.attach("one")
    return driver


def fence(pool: Driver, holder_id: str) -> None:
    pool.settle(pool.store.holder_is_gone(pool.now_s, holder_id))


def detach(pool: Driver, holder_id: str) -> None:
    pool.settle(pool.store.detach(pool.now_s, api.DetachRequest(holder_id)))


def states(pool: Driver) -> dict[str, str]:
    return {status.holder_id: status.state for status in pool.store.holder_statuses(pool.now_s)}


def test_attaching_again_is_idempotent(pool: Driver) -> None:
    (result,) = pool.reserve("one", item(0))
    assert pool.attach_step("one").effects == ()
    assert pool.commit("one", result.grant_id) == (True,)


def test_an_incarnation_is_one_process_with_one_identity(pool: Driver) -> None:
    with pytest.raises(StaleHolderError, match="another identity"):
        pool.attach("one", identity=b"J" * 32)


def test_a_holder_does_nothing_before_it_is_listed_durably(pool: Driver) -> None:
    step = pool.attach_step("two")
    again = pool.attach_step("two")
    assert (again.effects, again.after) == ((), step.ticket)
    with pytest.raises(StaleHolderError):
        pool.reserve_step("two", item(0))
    pool.fail(step)
    assert "two" not in states(pool)
    assert pool.attach_step("two").effects, "it must be listed anew"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"api_version": 99}, "api_version 99"),
        ({"tenant": "acme"}, "tenant 'acme'"),
        ({"rank_count": 0}, "rank_count 0"),
        ({"rank_count": 1025}, "rank_count 1025"),
        ({"handoff_token": "t"}, "hand-off token"),
        ({"engine_kind": "sglang"}, "engine_kind 'sglang'"),
        ({"identity": b"short"}, "identity of 5 bytes"),
        ({"host": "a\0b"}, "NUL"),
    ],
)
def test_what_is_not_served_is_refused_by_name(pool: Driver, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        pool.attach("two", **changes)
    assert list(states(pool)) == ["one"]


@pytest.mark.parametrize("incarnation", ["", "../../etc/x", "a/b", "a\0b", "x" * 65, "a b"])
def test_an_incarnation_names_a_file_and_nothing_else(pool: Driver, incarnation: str) -> None:
    with pytest.raises(UnsupportedError, match="incarnation"):
        pool.attach(incarnation)


def test_detach_gives_everything_back(pool: Driver) -> None:
    pool.put("one", item(0))
    pool.reserve("one", item(1))
    pool.match("one", 0)
    detach(pool, "one")
    assert (len(pool.store.leases), len(pool.store.grants), pool.holders) == (0, 0, {})
    assert [pool.store.segments.pins(i) for i in range(4)] == [(0, 0)] * 4
    detach(pool, "one")
    with pytest.raises(StaleHolderError):
        pool.match("one", 0)


def test_a_commit_on_its_way_survives_its_holder(pool: Driver) -> None:
    (result,) = pool.reserve("one", item(0))
    step = pool.commit_step("one", result.grant_id)
    goodbye = pool.store.detach(0.0, api.DetachRequest("one"))
    assert pool.store.segments.pins(0) == (0, 1)
    pool.settle(step)
    pool.settle(goodbye)
    assert pool.store.segments.pins(0) == (0, 0)
    assert len(pool.chunks) == 1


def test_silent_holders_are_probed_and_nothing_more(pool: Driver) -> None:
    pool.reserve("one", item(0))
    pool.pass_time(14.9)
    assert pool.store.holders.to_probe(pool.now_s) == ()
    pool.pass_time(1000.0)
    assert pool.store.holders.to_probe(pool.now_s) == ("one",)
    assert states(pool) == {"one": "silent"}
    assert len(pool.store.grants) == 1, "time alone frees nothing"


def test_a_fence_frees_only_when_durable(pool: Driver) -> None:
    pool.reserve("one", item(0))
    pool.pass_time(20.0)
    step = pool.store.holder_is_gone(pool.now_s, "one")
    assert len(pool.store.grants) == 1
    assert pool.store.holders.to_probe(pool.now_s) == (), "its fence is on its way"
    assert pool.store.holder_is_gone(pool.now_s, "one").effects == ()
    with pytest.raises(StaleHolderError):
        pool.commit_step("one")
    pool.settle(step)
    assert (len(pool.store.grants), states(pool), pool.holders["one"].fenced) == (0, {}, True)
    assert pool.store.counts["holders_fenced"] == 1


def test_a_fenced_incarnation_is_never_readmitted(pool: Driver) -> None:
    fence(pool, "one")
    with pytest.raises(StaleHolderError, match="never admitted again"):
        pool.attach("one")
    pool.restart()
    with pytest.raises(StaleHolderError, match="never admitted again"):
        pool.attach("one")


def test_a_failed_fence_is_tried_again_and_admits_nobody(pool: Driver) -> None:
    pool.reserve("one", item(0))
    pool.pass_time(20.0)
    pool.fail(pool.store.holder_is_gone(pool.now_s, "one"))
    assert len(pool.store.grants) == 1
    with pytest.raises(StaleHolderError):
        pool.attach("one")
    assert pool.store.holders.to_probe(pool.now_s) == ("one",)
    fence(pool, "one")
    assert len(pool.store.grants) == 0


def test_a_late_goodbye_does_not_lift_a_fence(pool: Driver) -> None:
    step = pool.store.holder_is_gone(0.0, "one")
    detach(pool, "one")
    pool.settle(step)
    assert pool.holders["one"].fenced


def test_nothing_is_reclaimed_until_former_holders_are_known(pool: Driver) -> None:
    pool.attach("two")
    pool.put("one", *(item(i, units=9) for i in range(4)))
    pool.restart()
    assert states(pool) == {"one": "former", "two": "former"}
    with pytest.raises(StaleHolderError):
        pool.match("one", 0)
    pool.attach("three")
    assert len(pool.match("three", 0, 1).chunks) == 2, "hits go on"
    pool.pass_time(60.0)

    def try_to_save() -> Outcome:
        return pool.reserve("three", item(9, units=9))[0].outcome

    assert try_to_save() is Outcome.NO_SPACE
    pool.attach("one")
    assert try_to_save() is Outcome.NO_SPACE
    fence(pool, "two")
    assert try_to_save() is Outcome.GRANTED


def test_unused_segments_may_be_opened_beside_former_holders(pool: Driver) -> None:
    pool.put("one", item(0))
    pool.restart()
    pool.attach("two")
    (result,) = pool.reserve("two", item(1))
    assert result.extents[0].segment == 1


def test_a_silent_host_of_a_target_is_condemned_and_refused_from_then_on(pool: Driver) -> None:
    pool.attach("far", access=api.Access.NVMEOF)
    pool.reserve("far", item(0))
    pool.pass_time(14.9)
    assert (pool.store.holders.to_serve(), pool.store.holders.to_cut_off()) == (("far",), ())
    pool.pass_time(0.1)
    assert pool.store.holders.to_probe(pool.now_s) == ("one",), "nobody's lock says anything of the other"
    assert (pool.store.holders.to_serve(), pool.store.holders.to_cut_off()) == ((), ("far",))
    assert states(pool)["far"] == "condemned"
    with pytest.raises(StaleHolderError):
        pool.store.heartbeat(pool.now_s, api.HeartbeatRequest("far", pool.epoch, ()))
    with pytest.raises(StaleHolderError, match="no longer trusted"):
        pool.attach("far", access=api.Access.NVMEOF)
    assert len(pool.store.grants) == 1
    pool.settle(pool.store.holder_is_gone(pool.now_s, "far"))
    assert (len(pool.store.grants), pool.holders["far"].fenced) == (0, True)
    assert pool.store.counts["holders_condemned"] == 1


def test_who_was_not_condemned_cannot_be_gone(pool: Driver) -> None:
    pool.attach("far", access=api.Access.NVMEOF)
    with pytest.raises(AssertionError, match="never condemned"):
        pool.store.holder_is_gone(pool.now_s, "far")
    with pytest.raises(AssertionError, match="only its target can confirm"):
        detach(pool, "far")
    with pytest.raises(AssertionError, match="cannot be cut off"):
        pool.store.holders.condemn("one")


def test_a_fence_of_a_targets_host_that_failed_is_to_be_confirmed_again(pool: Driver) -> None:
    pool.attach("far", access=api.Access.NVMEOF)
    pool.store.holders.condemn("far")
    pool.fail(pool.store.holder_is_gone(pool.now_s, "far"))
    assert pool.store.holders.to_cut_off() == ("far",)


def test_a_host_reaches_its_target_only_once_it_is_listed_durably(pool: Driver) -> None:
    """Else a service that ends before would leave access behind that nobody knows of."""
    step = pool.attach_step("far", access=api.Access.NVMEOF)
    assert pool.store.holders.to_serve() == ()
    pool.settle(step)
    assert pool.store.holders.to_serve() == ("far",)


def test_a_former_host_of_a_target_cannot_re_assert_itself(pool: Driver) -> None:
    """What it sent in the earlier epoch, the target may still be at: its promise is worth nothing."""
    pool.attach("far", access=api.Access.NVMEOF)
    pool.restart()
    assert pool.store.holders.to_serve() == ("far",), "its reads may go on for a while"
    with pytest.raises(StaleHolderError, match="new incarnation"):
        pool.attach("far", access=api.Access.NVMEOF)
    pool.pass_time(15.0)
    assert pool.store.holders.to_cut_off() == ("far",)


def test_a_doubtful_write_keeps_its_place_and_lets_others_write_the_chunk(pool: Driver) -> None:
    pool.attach("far", access=api.Access.NVMEOF)
    (grant,) = pool.reserve("far", item(0))
    pool.store.abort(pool.now_s, api.AbortRequest("far", pool.epoch, (), (grant.grant_id,)))
    assert pool.store.quarantined_segment_count() == 1
    assert pool.store.counts["grants_in_doubt"] == 1
    assert pool.commit("far", grant.grant_id) == (False,)
    pool.store.abort(pool.now_s, api.AbortRequest("one", pool.epoch, (grant.grant_id,)))
    assert pool.store.quarantined_segment_count() == 1, "another holder has no say"
    (again,) = pool.reserve("one", item(0))
    assert again.outcome is api.ReserveOutcome.GRANTED
    assert again.extents != grant.extents
    pool.store.holders.condemn("far")
    pool.settle(pool.store.holder_is_gone(pool.now_s, "far"))
    assert pool.store.quarantined_segment_count() == 0
