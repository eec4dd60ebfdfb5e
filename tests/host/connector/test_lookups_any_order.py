"""The way of requests through the cache, in any order of events, beside a service that keeps count of every lease."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshfusion.host.connector.lookups import Effect, Lookups, ReleaseLease, StartAudit, StartLoad, StartMatch
from tests.host.support.chunk_records import UNIT_BYTES, unit_digest, unit_lba
from tests.host.support.lookup_words import BLOCK, CHUNK, FORM, OPTIONS, PER_CHUNK, part_of, stored


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
        self.audited: set[str] = set()

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
                case StartAudit(request_id):
                    assert request_id in self.audited
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
        audit=st.booleans(),
        admit=st.sampled_from(["no", "zero", "trimmed", "full"]),
    )
    def scheduled(self, data: st.DataObject, local_blocks: int, worth: bool, audit: bool, admit: str) -> None:
        """One look of the scheduler at a waiting request: it asks, and may admit it at once."""
        request_id = data.draw(st.sampled_from(self.in_stage("waiting")))
        engine, local = self.engines[request_id], local_blocks * BLOCK
        was_audited = request_id in self.audited

        def is_to_be_audited(chosen: str) -> bool:
            assert chosen == request_id
            assert not was_audited
            if audit:
                self.audited.add(chosen)
            return audit

        tokens, effects = self.lookups.query(self.now_s, request_id, local, lambda *_: worth, is_to_be_audited)
        self.carry_out(effects)
        if request_id in self.audited:
            assert tokens == 0
            assert engine.promised is None, "it was audited after it had been promised"
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
        if request_id in self.loads or request_id in self.audited:
            self.engines[request_id].stage = "gone"  # the engine keeps its blocks, and its id, until the load ends
        else:
            del self.engines[request_id]
        assert self.lookups.finished("nobody") == []

    @precondition(lambda self: self.audited)
    @rule(data=st.data())
    def audit_ended(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.audited)))
        self.audited.discard(request_id)
        self.carry_out(self.lookups.audit_ended(request_id))
        if self.engines[request_id].stage == "gone":
            del self.engines[request_id]

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
        for request_id in self.audited:
            self.carry_out(self.lookups.audit_ended(request_id))
        for asked in self.asked:
            self._answer(asked, 2)
        assert len(self.lookups) == 0
        assert self.service.live() == []
        assert set(self.service.state.values()) <= {"released", "lost"}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
