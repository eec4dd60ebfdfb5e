"""Which chunks are saved, and that every pin is given back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshfusion.dpu.api.types import Extent, ReserveOutcome, ReserveResult
from meshfusion.host.connector.saves import ChunkSave, SaveOptions, Saves

BLOCK = 16
UNIT_BYTES = 4096
GRANTED = ReserveResult(ReserveOutcome.GRANTED, "g", (Extent(1, 0, 256, 9, 1),))
EXISTS = ReserveResult(ReserveOutcome.EXISTS)
BUSY = ReserveResult(ReserveOutcome.BUSY)
NO_SPACE = ReserveResult(ReserveOutcome.NO_SPACE)


def make_saves(*, blocks_per_chunk: int = 1, pending_max: int = 1000) -> Saves:
    return Saves(
        SaveOptions(queue_bytes=pending_max * UNIT_BYTES * blocks_per_chunk),
        block_tokens=BLOCK,
        blocks_per_chunk=blocks_per_chunk,
        unit_bytes=UNIT_BYTES,
        block_count=1_000_000,
    )


def hashes(count: int, stem: str = "h") -> list[bytes]:
    return [f"{stem}{i}".encode() for i in range(count)]


def ask(saves: Saves, tokens: int, *, request_id: str = "a", stem: str = "h", adapter_id: int = 0) -> list[ChunkSave]:
    blocks = -(-tokens // BLOCK)
    return saves.computed(request_id, tokens, hashes(tokens // BLOCK, stem), range(100, 100 + blocks), adapter_id)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 4])
def test_chunks_carry_their_own_blocks_and_the_hash_of_the_last(blocks_per_chunk: int) -> None:
    saves = make_saves(blocks_per_chunk=blocks_per_chunk)
    chosen = ask(saves, 13 * BLOCK + 5)
    assert len(chosen) == 13 // blocks_per_chunk
    for i, save in enumerate(chosen):
        first = i * blocks_per_chunk
        assert save.position_tokens == first * BLOCK
        assert save.block_ids == tuple(range(100 + first, 100 + first + blocks_per_chunk))
        assert save.block_hash == f"h{first + blocks_per_chunk - 1}".encode()
        assert (save.request_id, save.adapter_id) == ("a", 0)
    assert len({save.save_id for save in chosen}) == len(chosen)


@given(steps=st.lists(st.integers(1, 90), max_size=20), blocks_per_chunk=st.integers(1, 4))
def test_steps_of_any_size_consider_each_chunk_once(steps: list[int], blocks_per_chunk: int) -> None:
    saves = make_saves(blocks_per_chunk=blocks_per_chunk)
    tokens, positions = 0, []
    for step in steps:
        tokens += step
        is_due = saves.is_due("a", tokens)
        chosen = ask(saves, tokens)
        assert bool(chosen) == is_due
        positions += [save.position_tokens for save in chosen]
    chunk_tokens = BLOCK * blocks_per_chunk
    assert positions == list(range(0, tokens // chunk_tokens * chunk_tokens, chunk_tokens))


def test_nothing_beyond_the_known_hashes_or_blocks() -> None:
    """Draft tokens are scheduled before they are known: only full, hashed blocks count."""
    saves = make_saves()
    assert len(saves.computed("a", 5 * BLOCK, hashes(3), range(9), 0)) == 3
    assert len(saves.computed("a", 5 * BLOCK, hashes(5), range(4), 0)) == 1
    assert len(saves.computed("a", 5 * BLOCK, hashes(5), range(5), 0)) == 1


def test_chunks_that_came_from_the_pool_are_skipped() -> None:
    saves = make_saves()
    saves.start_at("a", 3)
    saves.start_at("a", 1)  # never backwards
    assert not saves.is_due("a", 3 * BLOCK)
    assert [save.position_tokens for save in ask(saves, 5 * BLOCK)] == [3 * BLOCK, 4 * BLOCK]


def test_the_same_chunk_of_another_request_is_not_asked_for_twice_but_another_adapter_is() -> None:
    saves = make_saves()
    assert len(ask(saves, 2 * BLOCK, request_id="a")) == 2
    assert len(ask(saves, 3 * BLOCK, request_id="b")) == 1
    assert len(ask(saves, 3 * BLOCK, request_id="c", adapter_id=7)) == 3


def test_the_queue_is_bounded_and_what_does_not_fit_waits_for_room_while_its_request_lives() -> None:
    saves = make_saves(pending_max=3)
    assert saves.is_due("a", 8 * BLOCK)
    chosen = ask(saves, 8 * BLOCK)
    assert len(chosen) == saves.pending_count == 3
    assert not saves.is_due("a", 8 * BLOCK), "no room"
    assert ask(saves, 8 * BLOCK) == []
    assert not saves.reserved(chosen[0].save_id, EXISTS)
    assert saves.is_due("a", 8 * BLOCK)
    assert [save.position_tokens for save in ask(saves, 8 * BLOCK)] == [3 * BLOCK], "in order, without a hole"
    assert saves.counters["saves_dropped_queue_full"] == 0
    saves.forget_request("a")
    assert saves.counters["saves_dropped_queue_full"] == 4


def test_at_most_a_quarter_of_the_engines_blocks_and_at_least_one_chunk() -> None:
    options = SaveOptions(queue_bytes=1 << 40)
    saves = Saves(options, block_tokens=BLOCK, blocks_per_chunk=2, unit_bytes=UNIT_BYTES, block_count=24)
    assert len(ask(saves, 100 * BLOCK)) == 3
    saves = Saves(SaveOptions(queue_bytes=1), block_tokens=BLOCK, blocks_per_chunk=2, unit_bytes=4096, block_count=24)
    assert len(ask(saves, 100 * BLOCK)) == 1


@pytest.mark.parametrize(("result", "asked_again"), [(EXISTS, 0), (BUSY, 0), (NO_SPACE, 1)])
def test_a_place_refused(result: ReserveResult, asked_again: int) -> None:
    saves = make_saves()
    (save,) = ask(saves, BLOCK)
    assert saves.reserved(save.save_id, result) is False
    assert saves.pending_count == saves.writing_count == 0
    assert len(ask(saves, BLOCK, request_id="b")) == asked_again


def test_a_service_that_is_away_and_a_write_that_failed_are_tried_by_the_next_request() -> None:
    saves = make_saves()
    (save,) = ask(saves, BLOCK)
    assert saves.refused(save.save_id) is save
    (save,) = ask(saves, BLOCK, request_id="b")
    assert saves.reserved(save.save_id, GRANTED) is True
    assert (saves.pending_count, saves.writing_count) == (1, 1)
    assert saves.written(save.save_id, ok=False) is save
    assert (saves.pending_count, saves.writing_count) == (0, 0)
    (save,) = ask(saves, BLOCK, request_id="c")
    saves.reserved(save.save_id, GRANTED)
    saves.written(save.save_id, ok=True)
    assert ask(saves, BLOCK, request_id="d") == []
    assert saves.counters["saves_dropped_service"] == saves.counters["saves_failed"] == 1


def test_what_the_service_lacks_is_saved_again_unless_it_is_on_its_way() -> None:
    saves = make_saves()
    first, second = ask(saves, 2 * BLOCK)
    saves.reserved(first.save_id, EXISTS)
    saves.not_stored([first.block_hash, second.block_hash, b"never seen"], 0)
    assert [save.block_hash for save in ask(saves, 2 * BLOCK, request_id="b")] == [first.block_hash]
    saves.not_stored([second.block_hash], 9)  # of another adapter
    assert ask(saves, 2 * BLOCK, request_id="c") == []


def test_after_a_failed_load_the_request_itself_saves_again() -> None:
    saves = make_saves()
    saves.start_at("a", 4)
    saves.save_again_from("a", 2)
    assert [save.position_tokens for save in ask(saves, 4 * BLOCK)] == [2 * BLOCK, 3 * BLOCK]
    saves.save_again_from("a", 9)  # never forwards
    assert len(ask(saves, 6 * BLOCK)) == 2


def test_another_pool_is_asked_for_everything() -> None:
    saves = make_saves()
    for save in ask(saves, 3 * BLOCK):
        saves.reserved(save.save_id, EXISTS)
    saves.forget_known()
    assert len(ask(saves, 3 * BLOCK, request_id="b")) == 3


def test_a_finished_request_is_forgotten_and_its_saves_go_on() -> None:
    saves = make_saves()
    (save,) = ask(saves, BLOCK)
    saves.forget_request("a")
    assert saves.pending(save.save_id) is save
    assert saves.reserved(save.save_id, GRANTED)
    assert saves.written(save.save_id, ok=True) is save


class AnyOrder(RuleBasedStateMachine):
    """The caller pins what ``computed`` returns and unpins when told to; block counts must come out even."""

    @initialize(blocks_per_chunk=st.integers(1, 4), pending_max=st.integers(1, 6))
    def start(self, blocks_per_chunk: int, pending_max: int) -> None:
        self.pending_max = pending_max
        self.per_chunk = blocks_per_chunk
        self.saves = make_saves(blocks_per_chunk=blocks_per_chunk, pending_max=pending_max)
        self.computed_tokens: dict[str, int] = {}
        self.asked: dict[int, ChunkSave] = {}
        self.granted: dict[int, ChunkSave] = {}
        self.seen: set[int] = set()
        self.considered: dict[str, int] = {}

    def unpin(self, save_id: int) -> None:
        self.asked.pop(save_id, None) or self.granted.pop(save_id)

    @rule(request=st.integers(0, 3), tokens=st.integers(1, 100))
    def step(self, request: int, tokens: int) -> None:
        request_id = f"r{request}"
        total = self.computed_tokens[request_id] = self.computed_tokens.get(request_id, 0) + tokens
        blocks = total // BLOCK
        stem = f"{request % 2}-"  # pairs of requests share their prompt
        for save in self.saves.computed(request_id, total, hashes(blocks, stem), range(blocks), 0):
            assert save.save_id not in self.seen
            assert save.position_tokens >= self.considered.get(request_id, 0), "considered twice"
            first = save.position_tokens // BLOCK
            assert save.block_ids == tuple(range(first, first + self.per_chunk))
            assert save.block_hash == f"{stem}{first + self.per_chunk - 1}".encode()
            on_the_way = [s.block_hash for s in (*self.asked.values(), *self.granted.values())]
            assert save.block_hash not in on_the_way or self.forgot_all
            self.seen.add(save.save_id)
            self.asked[save.save_id] = save
            self.considered[request_id] = save.position_tokens + self.per_chunk * BLOCK

    forgot_all = False

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), result=st.sampled_from([GRANTED, EXISTS, BUSY, NO_SPACE]))
    def reserved(self, data: st.DataObject, result: ReserveResult) -> None:
        save_id = data.draw(st.sampled_from(sorted(self.asked)))
        if self.saves.reserved(save_id, result):
            assert result is GRANTED
            self.granted[save_id] = self.asked.pop(save_id)
        else:
            self.unpin(save_id)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        save_id = data.draw(st.sampled_from(sorted(self.asked)))
        assert self.saves.refused(save_id) is self.asked[save_id]
        self.unpin(save_id)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), ok=st.booleans())
    def written(self, data: st.DataObject, ok: bool) -> None:
        save_id = data.draw(st.sampled_from(sorted(self.granted)))
        assert self.saves.written(save_id, ok=ok) is self.granted[save_id]
        self.unpin(save_id)

    @rule(request=st.integers(0, 3))
    def finished(self, request: int) -> None:
        self.saves.forget_request(f"r{request}")
        self.computed_tokens.pop(f"r{request}", None)
        self.considered.pop(f"r{request}", None)

    @rule(request=st.integers(0, 1), count=st.integers(0, 8))
    def not_stored(self, request: int, count: int) -> None:
        self.saves.not_stored(hashes(count, f"{request}-"), 0)

    @rule()
    def another_pool(self) -> None:
        self.saves.forget_known()
        self.forgot_all = True

    @invariant()
    def pins_and_pending_agree(self) -> None:
        assert self.saves.pending_count == len(self.asked) + len(self.granted) <= self.pending_max
        assert self.saves.writing_count == len(self.granted)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
