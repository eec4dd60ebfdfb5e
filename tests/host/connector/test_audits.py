"""Which hits are audited, what is compared when, and what follows from it."""

from __future__ import annotations

import math

import pytest

from meshfusion.host.connector.audits import CEILING, WAIT_S, AuditOptions, Audits, BlockDrift
from tests.host.support.chunk_records import make_stored

CHUNK = 64
STORED = make_stored(2, block_tokens=16, blocks_per_chunk=4)
FLOOR = 0.0625


def audits(share: float = 1.0, alarms_max: int = 2, draw: float = 0.0) -> Audits:
    return Audits(AuditOptions(share, alarms_max), lambda: draw)


def drift(difference: float, unit: int = 0) -> BlockDrift:
    return BlockDrift(unit, "layer.0", difference, FLOOR)


def comparing(made: Audits, request_id: str = "a") -> Audits:
    assert made.choose(0.0, request_id)
    made.admitted(request_id, 0, STORED)
    assert made.due(request_id, 128, CHUNK) == (0, STORED)
    made.compared()
    return made


@pytest.mark.parametrize(("share", "draw", "chosen"), [(0.0, 0.0, False), (0.1, 0.09, True), (0.1, 0.1, False)])
def test_a_share_of_hits_is_chosen(share: float, draw: float, chosen: bool) -> None:
    assert audits(share, draw=draw).choose(0.0, "a") is chosen


def test_one_at_a_time() -> None:
    made = audits()
    assert made.choose(0.0, "a")
    assert not made.choose(0.0, "b")
    assert made.give_up("a")
    assert made.choose(0.0, "b")


def test_it_is_due_when_all_that_is_stored_has_been_computed() -> None:
    made = audits()
    made.choose(0.0, "a")
    assert made.due("a", 500, CHUNK) is None, "it is not known yet what is stored"
    made.admitted("a", 32, STORED)
    assert made.due("a", 127, CHUNK) is None
    assert made.due("b", 128, CHUNK) is None
    made.admitted("a", 48, STORED)  # preempted, and admitted with more of the engine's own
    assert made.due("a", 128, CHUNK) == (48, STORED)
    made.compared()
    assert made.due("a", 192, CHUNK) is None, "once"


def test_one_that_is_not_computed_in_time_is_let_go_of() -> None:
    made = audits()
    made.choose(10.0, "a")
    assert made.late(10.0 + WAIT_S - 1) is None
    assert made.late(10.0 + WAIT_S) == "a"
    assert comparing(audits()).late(1e9) is None, "what the workers have, they report"


def test_what_is_being_compared_cannot_be_given_up() -> None:
    made = comparing(audits())
    assert not made.give_up("a")
    assert made.is_comparing
    made.reported([drift(0.0)], 0.0)
    assert (made.is_comparing, made.count) == (False, 0)


def test_rounding_is_no_alarm() -> None:
    made = comparing(audits())
    assert made.reported([drift(FLOOR), drift(0.01)], 0.0).alarms == ()
    assert made.counters == {"audits_started": 1, "audited_blocks": 2}
    assert made.drift_max == FLOOR


def test_alarms_name_their_blocks_and_enough_of_them_end_all_trust() -> None:
    made = comparing(audits())
    first = made.reported([drift(0.0), drift(0.9, 1), drift(math.inf, 2)], 0.0)
    assert first.alarms == ((drift(0.9, 1), FLOOR), (drift(math.inf, 2), FLOOR))
    assert not first.is_last_straw
    assert not made.is_distrusted
    second = comparing(made, "b").reported([drift(0.07)], 0.0)
    assert second.is_last_straw
    assert made.is_distrusted
    assert made.counters["audit_alarms"] == 2


def test_what_the_engine_varies_by_itself_widens_what_is_allowed() -> None:
    made = comparing(audits())
    assert made.tolerance(FLOOR) == FLOOR
    # Two computations differed by 0.05: four times that is allowed, in this audit already.
    assert made.reported([drift(0.19)], 0.05).alarms == ()
    assert made.tolerance(FLOOR) == pytest.approx(0.2)
    comparing(made, "b").reported([drift(0.0)], 0.01)
    assert made.variation == 0.05, "the largest counts"


def test_no_variation_excuses_kv_of_something_else() -> None:
    made = comparing(audits())
    assert made.reported([drift(0.51)], 10.0).alarms == ((drift(0.51), CEILING),)
    assert made.tolerance(2.0) == CEILING


def test_what_could_not_be_compared_says_nothing() -> None:
    made = comparing(audits())
    assert made.reported([], 0.0).alarms == ()
    assert made.counters["audits_without_verdict"] == 1


def test_after_a_reset_nothing_follows_from_what_is_being_compared() -> None:
    made = comparing(audits(alarms_max=1))
    assert made.void() is None
    assert made.reported([drift(1.0)], 1.0).alarms == ()
    assert not made.is_distrusted
    assert (made.drift_max, made.variation) == (0.0, 0.0)
    made.choose(0.0, "b")
    assert made.void() == "b"
