"""The way of a request through the cache: examples, and a model of the service that keeps count of every lease."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshfusion.host.connector.lookups import (
    Effect,
    LoadPart,
    LookupOptions,
    Lookups,
    ReleaseLease,
    StartLoad,
    StartMatch,
)
from meshfusion.host.pool_events import NOTHING_STORED, StoredBoundary
from tests.host.support.chunk_records import UNIT_BYTES, make_stored, one_group, unit_digest, unit_lba

BLOCK = 16
PER_CHUNK = 4
CHUNK = BLOCK * PER_CHUNK
FORM = one_group(block_tokens=BLOCK, blocks_per_chunk=PER_CHUNK)
OPTIONS = LookupOptions(deadline_s=0.02, soft_lease_max_s=10.0, early_lookups_max=3)


def stored(count: int, first_number: int = 0) -> StoredBoundary:
    return make_stored(count, block_tokens=BLOCK, blocks_per_chunk=PER_CHUNK, first_number=first_number)


def part_of(load: StartLoad) -> LoadPart:
    (part,) = load.parts
    assert part.group == 0
    return part


def always(tokens: int, load_bytes: int) -> bool:
    return True


def never(tokens: int, load_bytes: int) -> bool:
    return False


@pytest.fixture
def lookups() -> Lookups:
    return Lookups(OPTIONS, FORM)


def promise(lookups: Lookups, request_id: str = "a", chunks: int = 2, now_s: float = 0.0, lease: str = "L") -> None:
    (start,) = lookups.new_request(now_s, request_id)
    assert isinstance(start, StartMatch)
    assert lookups.matched(now_s, request_id, start.attempt, lease, stored(chunks)) == []


def test_a_hit_is_promised_loaded_and_given_back(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(0.001, "a", CHUNK // 2, always) == (2 * CHUNK - CHUNK // 2, [])
    (load,) = lookups.allocated("a", 2 * CHUNK - CHUNK // 2, [[100 + i for i in range(9)]])
    assert isinstance(load, StartLoad)
    # Blocks 2 to 7 of the request: units 2, 3 of chunk 0 and all four of chunk 1.
    assert part_of(load).first_block == 2
    assert part_of(load).block_ids == (102, 103, 104, 105, 106, 107)
    units = [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert part_of(load).lbas == (tuple(unit_lba(chunk, unit) for chunk, unit in units),)
    assert part_of(load).digests == (tuple(unit_digest(chunk, unit) for chunk, unit in units),)
    assert load.stored == stored(2)
    assert load.load_bytes == 6 * UNIT_BYTES
    assert lookups.live_lease_ids() == ("L",)
    assert lookups.load_finished("a", failed=False) == [ReleaseLease("L")]
    assert lookups.allocated("a", 0, []) == []  # the engine tells again once the load has ended
    assert lookups.finished("a") == []
    assert len(lookups) == 0


def test_trimmed_allocation_loads_only_what_was_taken(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.001, "a", 0, always)
    (load,) = lookups.allocated("a", 3 * BLOCK, [list(range(50, 60))])
    assert isinstance(load, StartLoad)
    assert part_of(load).block_ids == (50, 51, 52)
    assert len(part_of(load).lbas[0]) == len(part_of(load).digests[0]) == 3


def test_no_answer_before_the_deadline_then_a_miss_for_good(lookups: Lookups) -> None:
    (start,) = lookups.new_request(0.0, "a")
    assert isinstance(start, StartMatch)
    assert lookups.query(0.019, "a", 0, always) == (None, [])
    assert lookups.query(0.020, "a", 0, always) == (0, [])
    assert lookups.counters["lookups_timed_out"] == 1
    assert lookups.matched(0.021, "a", start.attempt, "late", stored(2)) == [ReleaseLease("late")]
    assert lookups.query(5.0, "a", 0, always) == (0, [])


def test_a_queue_that_moves_is_waited_for_but_not_for_ever() -> None:
    options = LookupOptions(deadline_s=0.02, patience_s=0.05)
    lookups = Lookups(options, FORM)
    starts = [start for i in range(4) for start in lookups.new_request(0.0, f"r{i}")]
    assert all(isinstance(start, StartMatch) for start in starts)
    assert lookups.matched(0.015, "r0", starts[0].attempt, "L0", stored(1)) == []  # type: ignore[union-attr]
    assert lookups.query(0.030, "r1", 0, always) == (None, [])  # the service answered 15 ms ago
    assert lookups.query(0.035, "r1", 0, always) == (0, [])  # and then nothing for 20 ms
    assert lookups.matched(0.036, "r2", starts[2].attempt, "L2", stored(1)) == []  # type: ignore[union-attr]
    assert lookups.query(0.049, "r3", 0, always) == (None, [])
    assert lookups.query(0.050, "r3", 0, always) == (0, []), "patience ends"


def test_lease_changes_are_told_once(lookups: Lookups) -> None:
    assert lookups.take_lease_change() is None
    promise(lookups)
    assert lookups.take_lease_change() == lookups.live_lease_ids()
    assert lookups.take_lease_change() is None
    lookups.finished("a")
    assert lookups.take_lease_change() == ()


def test_a_miss_and_an_empty_lease(lookups: Lookups) -> None:
    (start,) = lookups.new_request(0.0, "a")
    assert isinstance(start, StartMatch)
    assert lookups.matched(0.0, "a", start.attempt, "", NOTHING_STORED) == []
    assert lookups.query(0.0, "a", 0, always) == (0, [])
    (start,) = lookups.new_request(0.0, "b")
    assert isinstance(start, StartMatch)
    assert lookups.matched(0.0, "b", start.attempt, "E", NOTHING_STORED) == [ReleaseLease("E")]


def test_the_local_hit_may_cover_or_shrink(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(0.001, "a", 3 * CHUNK, never) == (0, [])  # nothing is decided while nothing is to be loaded
    assert lookups.query(0.001, "a", CHUNK, always) == (CHUNK, [])
    assert lookups.query(0.001, "a", 0, never) == (2 * CHUNK, [])  # decided once: it may not be taken back


def test_a_load_that_is_not_worth_it_is_a_miss_and_still_known(lookups: Lookups) -> None:
    promise(lookups)
    asked: list[tuple[int, int]] = []

    def refuse(tokens: int, load_bytes: int) -> bool:
        asked.append((tokens, load_bytes))
        return False

    assert lookups.query(0.0, "a", CHUNK, refuse) == (0, [ReleaseLease("L")])
    assert asked == [(CHUNK, PER_CHUNK * UNIT_BYTES)]
    assert lookups.matched_chunk_count("a") == 2  # no reason to save them again
    assert lookups.query(0.0, "a", 0, always) == (0, [])


def test_an_unused_promise_ages_and_is_asked_for_anew(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.query(9.9, "a", 0, always) == (2 * CHUNK, [])
    tokens, effects = lookups.query(10.1, "a", 0, always)
    assert tokens is None
    assert effects[0] == ReleaseLease("L")
    assert isinstance(effects[1], StartMatch)
    assert lookups.matched(10.11, "a", effects[1].attempt, "L2", stored(1)) == []
    assert lookups.query(10.12, "a", 0, always) == (CHUNK, [])


def test_admitted_without_our_tokens_then_preempted(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.0, "a", 0, always)
    assert lookups.allocated("a", 0, [[1, 2]]) == [ReleaseLease("L")]
    tokens, effects = lookups.query(1.0, "a", 0, always)  # preempted: asked again
    assert tokens is None
    assert [type(effect) for effect in effects] == [StartMatch]


def test_a_failed_load_is_never_tried_again(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.0, "a", 0, always)
    lookups.allocated("a", 2 * CHUNK, [list(range(8))])
    assert lookups.load_finished("a", failed=True) == [ReleaseLease("L")]
    assert lookups.matched_chunk_count("a") == 0  # what is recomputed is worth saving
    assert lookups.query(1.0, "a", 0, always) == (0, [])
    assert lookups.allocated("a", 0, []) == []
    assert lookups.query(2.0, "a", 0, always) == (0, [])


def test_aborted_while_loading_keeps_the_lease_until_the_workers_are_done(lookups: Lookups) -> None:
    promise(lookups)
    lookups.query(0.0, "a", 0, always)
    lookups.allocated("a", 2 * CHUNK, [list(range(8))])
    assert lookups.finished("a") == []
    assert lookups.live_lease_ids() == ("L",)
    assert lookups.load_finished("a", failed=False) == [ReleaseLease("L")]
    assert len(lookups) == 0
    assert lookups.load_finished("a", failed=False) == []


def test_a_lost_lease_ends_the_promise_but_not_the_load(lookups: Lookups) -> None:
    promise(lookups, "a", lease="LA")
    promise(lookups, "b", lease="LB")
    lookups.query(0.0, "b", 0, always)
    lookups.allocated("b", CHUNK, [list(range(8))])
    lookups.leases_lost(["LA", "LB", "unknown"])
    assert lookups.query(0.0, "a", 0, always)[0] is None
    assert lookups.load_finished("b", failed=False) == []
    assert lookups.live_lease_ids() == ()


def test_reset_ends_promises_and_orphans_lookups(lookups: Lookups) -> None:
    promise(lookups, "a", lease="LA")
    (start,) = lookups.new_request(0.0, "b")
    assert isinstance(start, StartMatch)
    assert lookups.reset() == [ReleaseLease("LA")]
    assert lookups.matched(0.0, "b", start.attempt, "LB", stored(1)) == [ReleaseLease("LB")]
    assert lookups.query(0.0, "a", 0, always)[0] is None


def test_an_answer_from_before_a_reset_does_not_answer_the_question_after_it(lookups: Lookups) -> None:
    (before,) = lookups.new_request(0.0, "a")
    assert isinstance(before, StartMatch)
    lookups.reset()
    tokens, (after,) = lookups.query(0.001, "a", 0, always)
    assert tokens is None
    assert isinstance(after, StartMatch)
    assert lookups.matched(0.002, "a", before.attempt, "old", stored(2)) == [ReleaseLease("old")]
    assert lookups.query(0.003, "a", 0, always) == (None, [])
    assert lookups.matched(0.004, "a", after.attempt, "new", stored(1)) == []
    assert lookups.query(0.005, "a", 0, always) == (CHUNK, [])


def test_only_so_many_look_before_they_are_asked(lookups: Lookups) -> None:
    started = [bool(lookups.new_request(0.0, f"r{i}")) for i in range(5)]
    assert started == [True, True, True, False, False]
    tokens, effects = lookups.query(0.0, "r4", 0, always)
    assert tokens is None
    assert len(effects) == 1


def test_the_same_request_announced_twice_keeps_its_lease(lookups: Lookups) -> None:
    promise(lookups)
    assert lookups.new_request(0.0, "a") == []
    assert lookups.finished("a") == [ReleaseLease("L")]


# ---- any order of events -------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """What the engine knows of one request."""

    stage: str = "waiting"  # waiting, loading, loaded, running, gone
    may_not_load: bool = False
    promised: int | None = None  # the boundary last answered, while it stands
    lease_id: str = ""
    none_since_s: float | None = None


@dataclass
class Asked:
    request_id: str
    attempt: int
    asked_s: float


@dataclass
class Service:
    """A lease is live, then released once or lost; nothing else."""

    state: dict[str, str] = field(default_factory=dict)

    def grant(self) -> str:
        lease_id = f"lease-{len(self.state)}"
        self.state[lease_id] = "live"
        return lease_id

    def live(self) -> list[str]:
        return [lease_id for lease_id, state in self.state.items() if state == "live"]


REQUESTS = st.integers(0, 5).map(lambda i: f"r{i}")


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.options = OPTIONS
        self.lookups = Lookups(OPTIONS, FORM)
        self.now_s = 100.0
        self.last_answer_s = 0.0
        self.service = Service()
        self.engines: dict[str, Engine] = {}
        self.asked: list[Asked] = []
        self.answered: list[Asked] = []
        self.attempt_of: dict[str, Asked] = {}
        self.lease_of: dict[str, tuple[str, int]] = {}  # lease -> request, boundary
        self.first_number_of: dict[str, int] = {}  # lease -> number of its first chunk
        self.loads: dict[str, StartLoad] = {}

    def carry_out(self, effects: list[Effect]) -> StartLoad | None:
        load = None
        for effect in effects:
            match effect:
                case StartMatch(request_id, attempt):
                    assert all(asked.attempt != attempt for asked in self.asked + self.answered)
                    asked = Asked(request_id, attempt, self.now_s)
                    self.asked.append(asked)
                    self.attempt_of[request_id] = asked
                case ReleaseLease(lease_id):
                    assert self.service.state[lease_id] in ("live", "lost"), "released twice"
                    if self.service.state[lease_id] == "live":
                        self.service.state[lease_id] = "released"
                    for engine in self.engines.values():
                        if engine.lease_id == lease_id:
                            engine.lease_id, engine.promised = "", None
                case StartLoad():
                    assert load is None
                    load = effect
        return load

    # ---- engine ----

    @rule(request_id=REQUESTS)
    def new_request(self, request_id: str) -> None:
        if request_id in self.engines:
            return
        self.engines[request_id] = Engine()
        self.carry_out(self.lookups.new_request(self.now_s, request_id))

    def in_stage(self, *stages: str) -> list[str]:
        return [request_id for request_id, engine in self.engines.items() if engine.stage in stages]

    @precondition(lambda self: self.in_stage("waiting"))
    @rule(
        data=st.data(),
        local_blocks=st.integers(0, 14),
        worth=st.booleans(),
        admit=st.sampled_from(["no", "zero", "trimmed", "full"]),
    )
    def scheduled(self, data: st.DataObject, local_blocks: int, worth: bool, admit: str) -> None:
        """One look of the scheduler at a waiting request: it asks, and may admit it at once."""
        request_id = data.draw(st.sampled_from(self.in_stage("waiting")))
        engine, local = self.engines[request_id], local_blocks * BLOCK
        tokens, effects = self.lookups.query(self.now_s, request_id, local, lambda *_: worth)
        self.carry_out(effects)
        if tokens is None:
            asked = self.attempt_of[request_id]
            last_sign_s = max(asked.asked_s, self.last_answer_s)
            assert self.now_s < last_sign_s + OPTIONS.deadline_s, "no answer past the deadline"
            assert self.now_s < asked.asked_s + OPTIONS.patience_s, "no answer past all patience"
            assert engine.promised is None, "a promise was withdrawn without its lease being given back or lost"
            return
        assert tokens >= 0
        if tokens > 0:
            assert not engine.may_not_load
            boundary = local + tokens
            assert engine.promised in (None, boundary), "the promised boundary moved"
            held = [(lease, b) for lease, (owner, b) in self.lease_of.items() if owner == request_id]
            (lease_id, granted_boundary) = held[-1]
            assert boundary == granted_boundary
            assert lease_id in self.lookups.live_lease_ids()
            engine.promised, engine.lease_id = boundary, lease_id
        elif engine.promised is not None:
            assert local >= engine.promised, "the promise was forgotten"
        if admit == "no":
            return
        take = {"zero": 0, "full": tokens, "trimmed": (tokens // BLOCK // 2) * BLOCK}[admit]
        block_ids = [1000 + 7 * i for i in range(64)]
        load = self.carry_out(self.lookups.allocated(request_id, take, [block_ids]))
        if take == 0:
            assert load is None
            engine.stage, engine.promised, engine.lease_id = "running", None, ""
            return
        assert load is not None
        indexes = range(local // BLOCK, (local + take) // BLOCK)
        assert part_of(load).first_block == indexes[0]
        assert part_of(load).block_ids == tuple(1000 + 7 * i for i in indexes)
        first_number = self.first_number_of[engine.lease_id]
        units = [(first_number + i // PER_CHUNK, i % PER_CHUNK) for i in indexes]
        assert part_of(load).lbas == (tuple(unit_lba(number, unit) for number, unit in units),)
        assert part_of(load).digests == (tuple(unit_digest(number, unit) for number, unit in units),)
        assert load.load_bytes == len(indexes) * UNIT_BYTES
        self.loads[request_id] = load
        engine.stage = "loading"

    @precondition(lambda self: self.in_stage("loaded"))
    @rule(data=st.data())
    def admitted_after_load(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.in_stage("loaded")))
        assert self.lookups.allocated(request_id, 0, []) == []
        self.engines[request_id].stage = "running"

    @precondition(lambda self: self.in_stage("running"))
    @rule(data=st.data())
    def preempted(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.in_stage("running")))
        self.engines[request_id].stage = "waiting"

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), failed=st.booleans())
    def load_finished(self, data: st.DataObject, failed: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.loads)))
        del self.loads[request_id]
        self.carry_out(self.lookups.load_finished(request_id, failed=failed))
        engine = self.engines[request_id]
        if engine.stage == "gone":
            del self.engines[request_id]
            return
        engine.promised, engine.lease_id = None, ""
        engine.may_not_load = engine.may_not_load or failed
        # After a load that brought nothing the engine asks again; otherwise it goes on.
        engine.stage = "waiting" if failed and data.draw(st.booleans()) else "loaded"

    @precondition(lambda self: self.in_stage("waiting", "loading", "loaded", "running"))
    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.in_stage("waiting", "loading", "loaded", "running")))
        self.carry_out(self.lookups.finished(request_id))
        if request_id in self.loads:
            self.engines[request_id].stage = "gone"  # the engine keeps its blocks, and its id, until the load ends
        else:
            del self.engines[request_id]
        assert self.lookups.finished("nobody") == []

    @rule()
    def reset(self) -> None:
        self.carry_out(self.lookups.reset())

    # ---- service ----

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), chunks=st.integers(0, 3))
    def answered_lookup(self, data: st.DataObject, chunks: int) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        self.asked.remove(asked)
        self.answered.append(asked)
        self._answer(asked, chunks)

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), chunks=st.integers(0, 3))
    def answered_twice(self, data: st.DataObject, chunks: int) -> None:
        self._answer(data.draw(st.sampled_from(self.answered[-5:])), chunks)

    def _answer(self, asked: Asked, chunks: int) -> None:
        lease_id = self.service.grant() if chunks else ""
        number = 100 * len(self.service.state)
        found = stored(chunks, number)
        if chunks:
            self.first_number_of[lease_id] = number
            self.lease_of[lease_id] = (asked.request_id, chunks * CHUNK)
        self.last_answer_s = self.now_s
        self.carry_out(self.lookups.matched(self.now_s, asked.request_id, asked.attempt, lease_id, found))
        if lease_id and self.service.state[lease_id] == "released":
            del self.lease_of[lease_id]

    @precondition(lambda self: self.lookups.live_lease_ids())
    @rule(data=st.data())
    def leases_lost(self, data: st.DataObject) -> None:
        lost = data.draw(st.lists(st.sampled_from(self.lookups.live_lease_ids()), unique=True))
        self.lookups.leases_lost(lost)
        for lease_id in lost:
            self.service.state[lease_id] = "lost"
            for engine in self.engines.values():
                if engine.lease_id == lease_id:
                    engine.lease_id, engine.promised = "", None

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.5, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    # ---- always ----

    @invariant()
    def every_live_lease_is_held_and_every_held_lease_is_live(self) -> None:
        assert sorted(self.lookups.live_lease_ids()) == sorted(self.service.live())

    @invariant()
    def nothing_outlives_its_request(self) -> None:
        assert len(self.lookups) == len(self.engines)

    def teardown(self) -> None:
        for request_id in list(self.engines):
            self.carry_out(self.lookups.finished(request_id))
        for request_id in self.loads:
            self.carry_out(self.lookups.load_finished(request_id, failed=False))
        for asked in self.asked:
            self._answer(asked, 2)
        assert len(self.lookups) == 0
        assert self.service.live() == []
        assert set(self.service.state.values()) <= {"released", "lost"}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
