"""Which chunks are saved, and that every pin is given back exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshfusion.dpu.api.limits import MAX_ITEMS
from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.host.connector.saves import KnownChunks, SaveChunk, SaveOptions, SaveRun, Saves
from tests.host.support.chunk_records import one_group

BLOCK = 16
UNIT_BYTES = 4096
GRANTED, EXISTS, BUSY, NO_SPACE = (
    ReserveOutcome.GRANTED,
    ReserveOutcome.EXISTS,
    ReserveOutcome.BUSY,
    ReserveOutcome.NO_SPACE,
)


def make_saves(*, blocks_per_chunk: int = 1, pending_max: int = 1000) -> Saves:
    form = one_group(block_tokens=BLOCK, blocks_per_chunk=blocks_per_chunk, unit_bytes=UNIT_BYTES)
    return Saves(SaveOptions(pending_max * UNIT_BYTES * blocks_per_chunk, 1_000_000), form)


def hashes(count: int, stem: str = "h") -> list[bytes]:
    """Of the chunks of a prompt."""
    return [f"{stem}{i}".encode() for i in range(count)]


def ask(
    saves: Saves, tokens: int, *, request_id: str = "a", stem: str = "h", blocks_per_chunk: int = 1
) -> list[SaveRun]:
    """As the pipeline does: block ``i`` of any request is device block ``100 + i``."""
    due = saves.due_chunks(request_id, tokens)
    chunks = [
        SaveChunk(
            0, i, f"{stem}{i}".encode(), tuple(range(100 + i * blocks_per_chunk, 100 + (i + 1) * blocks_per_chunk))
        )
        for i in due
    ]
    run = saves.take(request_id, due, chunks)
    return [run] if run is not None else []


def chunks_of(runs: list[SaveRun]) -> list[int]:
    """The chunks of the request, counted from 0."""
    return [chunk.number for run in runs for chunk in run.chunks]


def hashes_of(run: SaveRun) -> list[bytes]:
    return [chunk.chunk_hash for chunk in run.chunks]


def blocks_of(run: SaveRun) -> list[int]:
    return [block_id for chunk in run.chunks for block_id in chunk.block_ids]


def answer(saves: Saves, run: SaveRun, *outcomes: ReserveOutcome) -> SaveRun | None:
    """The service's answer for each chunk of the run, or one for all of them."""
    each = outcomes * run.chunk_count if len(outcomes) == 1 else outcomes
    no_space = [i for i, outcome in enumerate(each) if outcome is NO_SPACE]
    return saves.reserved(run.run_id, Counter(each), no_space)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 4])
def test_a_run_carries_its_blocks_and_the_hashes_of_its_chunks(blocks_per_chunk: int) -> None:
    saves = make_saves(blocks_per_chunk=blocks_per_chunk)
    count = 13 // blocks_per_chunk
    (run,) = ask(saves, 13 * BLOCK + 5, blocks_per_chunk=blocks_per_chunk)
    assert (run.request_id, chunks_of([run])) == ("a", list(range(count)))
    assert hashes_of(run) == hashes(count)
    assert blocks_of(run) == list(range(100, 100 + count * blocks_per_chunk))
    (later,) = ask(saves, 20 * BLOCK, blocks_per_chunk=blocks_per_chunk)
    assert chunks_of([later]) == list(range(count, 20 // blocks_per_chunk))
    assert blocks_of(later)[0] == 100 + count * blocks_per_chunk
    assert later.run_id != run.run_id
    assert saves.pending_count == 20 // blocks_per_chunk


@given(steps=st.lists(st.integers(1, 90), max_size=20), blocks_per_chunk=st.integers(1, 4))
def test_steps_of_any_size_consider_each_chunk_once(steps: list[int], blocks_per_chunk: int) -> None:
    saves = make_saves(blocks_per_chunk=blocks_per_chunk)
    tokens, chunks = 0, []
    for step in steps:
        tokens += step
        chunks += chunks_of(ask(saves, tokens, blocks_per_chunk=blocks_per_chunk))
    assert chunks == list(range(tokens // (BLOCK * blocks_per_chunk)))


@pytest.mark.parametrize("taken", range(6))
def test_what_was_not_considered_comes_later(taken: int) -> None:
    """Draft tokens are scheduled before they are known: what is hashed and in the tables is considered."""
    saves = make_saves()
    assert saves.due_chunks("a", 5 * BLOCK) == range(5)
    run = saves.take("a", range(taken), [SaveChunk(0, i, b"h%d" % i, (100 + i,)) for i in range(taken)])
    assert chunks_of([run] if run else []) == list(range(taken))
    assert chunks_of(ask(saves, 5 * BLOCK)) == list(range(taken, 5))


def test_what_the_engine_has_no_more_is_passed_over_for_good() -> None:
    saves = make_saves()
    run = saves.take("a", range(4), [SaveChunk(0, i, b"h%d" % i, (100 + i,)) for i in (0, 3)])
    assert run is not None
    assert chunks_of([run]) == [0, 3]
    assert chunks_of(ask(saves, 5 * BLOCK)) == [4]


def test_chunks_that_came_from_the_pool_are_skipped() -> None:
    saves = make_saves()
    saves.start_at("a", 3)
    saves.start_at("a", 1)  # never backwards
    assert not saves.due_chunks("a", 3 * BLOCK)
    assert chunks_of(ask(saves, 5 * BLOCK)) == [3, 4]


def test_the_same_chunk_of_another_request_is_not_asked_for_twice() -> None:
    saves = make_saves()
    assert chunks_of(ask(saves, 2 * BLOCK, request_id="a")) == [0, 1]
    assert chunks_of(ask(saves, 3 * BLOCK, request_id="b")) == [2]
    assert chunks_of(ask(saves, 3 * BLOCK, request_id="c")) == []
    assert chunks_of(ask(saves, 3 * BLOCK, request_id="d", stem="other")) == [0, 1, 2]


def test_known_chunks_in_the_middle_are_left_out() -> None:
    saves = make_saves()
    for request_id, index in (("x", 1), ("y", 5)):
        saves.start_at(request_id, index)
        saves.take(request_id, range(index, index + 1), [SaveChunk(0, index, b"h%d" % index, (7,))])
    (run,) = ask(saves, 8 * BLOCK, request_id="b")
    assert chunks_of([run]) == [0, 2, 3, 4, 6, 7]
    assert blocks_of(run) == [100, 102, 103, 104, 106, 107]
    assert hashes_of(run) == [b"h0", b"h2", b"h3", b"h4", b"h6", b"h7"]
    assert saves.pending_count == 2 + 6


def test_the_queue_is_bounded_and_what_does_not_fit_waits_for_room_while_its_request_lives() -> None:
    saves = make_saves(pending_max=3)
    (run,) = ask(saves, 8 * BLOCK)
    assert run.chunk_count == saves.pending_count == 3
    assert not saves.due_chunks("a", 8 * BLOCK), "no room"
    assert ask(saves, 8 * BLOCK) == []
    assert answer(saves, run, EXISTS) is run
    assert chunks_of(ask(saves, 8 * BLOCK)) == [3, 4, 5], "in order, without a hole"
    assert saves.counters["saves_dropped_queue_full"] == 0
    saves.forget_request("a")
    assert saves.counters["saves_dropped_queue_full"] == 2


def test_at_most_a_quarter_of_the_engines_blocks_one_message_and_at_least_one_chunk() -> None:
    def taken(queue_bytes: int, blocks_per_chunk: int, block_count: int) -> int:
        form = one_group(block_tokens=BLOCK, blocks_per_chunk=blocks_per_chunk, unit_bytes=1)
        saves = Saves(SaveOptions(queue_bytes, block_count), form)
        return len(saves.due_chunks("a", 100_000 * BLOCK))

    assert taken(1 << 40, 2, 24) == 3
    assert taken(0, 2, 24) == 1
    assert taken(1 << 40, 1, 1 << 20) == MAX_ITEMS


@pytest.mark.parametrize(("outcome", "asked_again"), [(EXISTS, []), (BUSY, []), (NO_SPACE, [0])])
def test_a_place_refused(outcome: ReserveOutcome, asked_again: list[int]) -> None:
    saves = make_saves()
    (run,) = ask(saves, BLOCK)
    assert answer(saves, run, outcome) is run
    assert saves.pending_count == saves.writing_count == 0
    assert saves.counters[f"reserve_{outcome.value}"] == 1
    assert chunks_of(ask(saves, BLOCK, request_id="b")) == asked_again


def test_a_run_granted_in_part_goes_on_and_what_found_no_space_is_asked_for_again() -> None:
    saves = make_saves()
    (run,) = ask(saves, 5 * BLOCK)
    assert answer(saves, run, GRANTED, EXISTS, NO_SPACE, GRANTED, BUSY) is None
    assert (saves.pending_count, saves.writing_count) == (5, 2)
    assert saves.written(run.run_id, [3]) is run
    assert (saves.pending_count, saves.writing_count) == (0, 0)
    assert chunks_of(ask(saves, 5 * BLOCK, request_id="b")) == [2, 3]
    assert saves.counters["saves_failed"] == 1


def test_a_service_that_is_away_and_a_write_that_failed_are_tried_by_the_next_request() -> None:
    saves = make_saves()
    (run,) = ask(saves, 2 * BLOCK)
    assert saves.refused(run.run_id) is run
    (run,) = ask(saves, 2 * BLOCK, request_id="b")
    assert answer(saves, run, GRANTED) is None
    assert saves.run(run.run_id) is run
    assert saves.written(run.run_id, [0, 1]) is run
    (run,) = ask(saves, 2 * BLOCK, request_id="c")
    answer(saves, run, GRANTED)
    saves.written(run.run_id, [])
    assert ask(saves, 2 * BLOCK, request_id="d") == []
    assert saves.counters["saves_dropped_service"] == saves.counters["saves_failed"] == 2


def test_what_the_service_lacks_is_saved_again_unless_it_is_on_its_way() -> None:
    saves = make_saves()
    (first,) = ask(saves, BLOCK)
    (second,) = ask(saves, 2 * BLOCK)
    answer(saves, first, EXISTS)
    saves.not_stored([*hashes_of(first), *hashes_of(second), b"never seen"])
    assert chunks_of(ask(saves, 2 * BLOCK, request_id="b")) == [0]


def test_after_a_failed_load_the_request_itself_saves_again() -> None:
    saves = make_saves()
    saves.start_at("a", 4)
    saves.save_again_from("a", 2)
    assert chunks_of(ask(saves, 4 * BLOCK)) == [2, 3]
    saves.save_again_from("a", 9)  # never forwards
    assert chunks_of(ask(saves, 6 * BLOCK)) == [4, 5]


def test_another_pool_is_asked_for_everything() -> None:
    saves = make_saves()
    (run,) = ask(saves, 3 * BLOCK)
    answer(saves, run, EXISTS)
    saves.forget_known()
    assert chunks_of(ask(saves, 3 * BLOCK, request_id="b")) == [0, 1, 2]


def test_a_finished_request_is_forgotten_and_its_saves_go_on() -> None:
    saves = make_saves()
    (run,) = ask(saves, BLOCK)
    saves.forget_request("a")
    assert saves.run(run.run_id) is run
    assert answer(saves, run, GRANTED) is None
    assert saves.written(run.run_id, []) is run


def test_an_answer_for_another_number_of_chunks_is_our_own_mistake() -> None:
    saves = make_saves()
    (run,) = ask(saves, 2 * BLOCK)
    with pytest.raises(AssertionError):
        saves.reserved(run.run_id, {GRANTED: 1}, [])


@given(additions=st.lists(st.lists(st.integers(0, 40).map(lambda i: b"%d" % i), max_size=8), max_size=30))
def test_known_chunks_are_bounded_and_keep_the_newest(additions: list[list[bytes]]) -> None:
    known = KnownChunks(20)
    order: list[bytes] = []
    for addition in additions:
        known.add(addition)
        order = [h for h in order if h not in addition] + list(dict.fromkeys(addition))
        assert len(known) <= 20 + 8, "one addition more at most"
        assert all(h in known for h in order[-10:])
        assert known.has_any([b"x", *order[-1:]]) == bool(order)
    known.remove(order[-3:])
    assert not known.has_any(order[-3:])
    known.clear()
    assert not known.has_any(order)
    assert len(known) == 0


class AnyOrder(RuleBasedStateMachine):
    """The caller pins what ``take`` returns and unpins when a run ends; block counts must come out even."""

    @initialize(blocks_per_chunk=st.integers(1, 4), pending_max=st.integers(1, 6))
    def start(self, blocks_per_chunk: int, pending_max: int) -> None:
        self.pending_max = pending_max
        self.per_chunk = blocks_per_chunk
        self.saves = make_saves(blocks_per_chunk=blocks_per_chunk, pending_max=pending_max)
        self.computed_tokens: dict[str, int] = {}
        self.asked: dict[int, SaveRun] = {}
        self.granted: dict[int, tuple[SaveRun, int]] = {}
        self.placed: dict[int, set[bytes]] = {}
        self.seen: set[int] = set()
        self.considered: dict[str, int] = {}

    @rule(request=st.integers(0, 3), tokens=st.integers(1, 200))
    def step(self, request: int, tokens: int) -> None:
        request_id = f"r{request}"
        total = self.computed_tokens[request_id] = self.computed_tokens.get(request_id, 0) + tokens
        stem = f"{request % 2}-"  # pairs of requests share their prompt
        for run in ask(self.saves, total, request_id=request_id, stem=stem, blocks_per_chunk=self.per_chunk):
            assert run.run_id not in self.seen
            indexes = chunks_of([run])
            assert indexes == sorted(set(indexes))
            assert indexes[0] >= self.considered.get(request_id, 0), "considered twice"
            assert blocks_of(run) == [100 + i * self.per_chunk + n for i in indexes for n in range(self.per_chunk)]
            assert hashes_of(run) == [f"{stem}{i}".encode() for i in indexes]
            assert not self.on_the_way() & set(hashes_of(run)) or self.forgot_all
            self.seen.add(run.run_id)
            self.asked[run.run_id] = run
            self.considered[request_id] = indexes[-1] + 1

    forgot_all = False

    def on_the_way(self) -> set[bytes]:
        asked = {chunk_hash for run in self.asked.values() for chunk_hash in hashes_of(run)}
        return asked.union(*self.placed.values())

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def reserved(self, data: st.DataObject) -> None:
        run = self.asked.pop(data.draw(st.sampled_from(sorted(self.asked))))
        some = st.lists(
            st.sampled_from([GRANTED, EXISTS, BUSY, NO_SPACE]), min_size=run.chunk_count, max_size=run.chunk_count
        )
        outcomes = data.draw(some)
        ended = answer(self.saves, run, *outcomes)
        if GRANTED in outcomes:
            assert ended is None
            self.granted[run.run_id] = run, outcomes.count(GRANTED)
            # What found no space may be asked for again by another request with this prompt, at once.
            placed = (h for h, outcome in zip(hashes_of(run), outcomes, strict=True) if outcome is not NO_SPACE)
            self.placed[run.run_id] = set(placed)
        else:
            assert ended is run

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.asked)))
        assert self.saves.refused(run_id) is self.asked.pop(run_id)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def written(self, data: st.DataObject) -> None:
        run, _ = self.granted.pop(data.draw(st.sampled_from(sorted(self.granted))))
        del self.placed[run.run_id]
        failed = data.draw(st.sets(st.integers(0, run.chunk_count - 1)))
        assert self.saves.written(run.run_id, sorted(failed)) is run

    @rule(request=st.integers(0, 3))
    def finished(self, request: int) -> None:
        self.saves.forget_request(f"r{request}")
        self.computed_tokens.pop(f"r{request}", None)
        self.considered.pop(f"r{request}", None)

    @rule(request=st.integers(0, 1), count=st.integers(0, 8))
    def not_stored(self, request: int, count: int) -> None:
        self.saves.not_stored(hashes(count, f"{request}-"))

    @rule()
    def another_pool(self) -> None:
        self.saves.forget_known()
        self.forgot_all = True

    @invariant()
    def pins_and_pending_agree(self) -> None:
        pinned = sum(run.chunk_count for run in self.asked.values())
        pinned += sum(run.chunk_count for run, _ in self.granted.values())
        assert self.saves.pending_count == pinned <= self.pending_max
        assert self.saves.writing_count == sum(count for _, count in self.granted.values())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
