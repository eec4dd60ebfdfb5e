"""A large reservation is decided in parts: lookups come between them, and nobody can tell from the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_tending import Policy
from meshfusion.dpu.reserve_parts import PART_ITEMS, in_parts, joined, part_of
from meshfusion.jbof.errors import StaleHolderError
from tests.dpu.pool_cases import DEADLINE_S, UNIT_BYTES, Holder, make_pool

CHUNK_TOKENS = 16


def item(request: str, group: int, i: int) -> api.ReserveItem:
    name = bytes([group]) + i.to_bytes(3, "big") + request.encode().ljust(28)
    return api.ReserveItem(name, group, CHUNK_TOKENS * i, CHUNK_TOKENS, (api.ShardSize(0, UNIT_BYTES, 1),), 1, request)


ITEMS = st.lists(st.builds(item, st.sampled_from(("", "a", "b")), st.integers(0, 3), st.integers(0, 9)), max_size=40)


@given(ITEMS, st.integers(1, 10))
def test_each_item_is_in_one_part_with_all_of_its_position(items: list[api.ReserveItem], part_items: int) -> None:
    parts = in_parts(items, part_items)
    assert sorted(i for part in parts for i in part) == list(range(len(items)))
    where = {i: number for number, part in enumerate(parts) for i in part}
    places = [(it.request_id, it.position_tokens) for it in items]
    for i, place in enumerate(places):
        assert where[i] == where[places.index(place)]
    for part in parts:
        largest = max((places.count(places[i]) for i in part), default=0)
        assert len(part) <= max(part_items, largest)


@given(ITEMS, st.integers(1, 10))
def test_answers_come_in_the_order_asked(items: list[api.ReserveItem], part_items: int) -> None:
    request = api.ReserveRequest("holder", 1, tuple(items))
    parts = in_parts(items, part_items)
    granted = api.ReserveOutcome.GRANTED
    replies = [
        api.ReserveReply(tuple(api.ReserveResult(granted, asked.key.hex()) for asked in part_of(request, part).items))
        for part in parts
    ]
    assert [result.grant_id for result in joined(parts, replies).results] == [asked.key.hex() for asked in items]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool", PoolOptions(policy=Policy.EVERYTHING)) as opened:
        yield opened


def test_a_lookup_comes_between_the_parts(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is made to take 0.1 s under the mutex; the lookup is asked during the first one."""
    with Holder(pool) as holder:
        reserve, began = pool._store.reserve, threading.Event()

        def slowly(*args: object) -> object:
            began.set()
            time.sleep(0.1)
            return reserve(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(pool._store, "reserve", slowly)
        items = tuple(item("a", 0, i) for i in range(10 * PART_ITEMS))
        request = api.ReserveRequest(holder.id, holder.attachment.epoch, items)
        results: list[api.ReserveReply] = []
        writer = threading.Thread(target=lambda: results.append(pool.reserve(request, deadline_s=DEADLINE_S)))
        writer.start()
        assert began.wait(DEADLINE_S)
        holder.match_alone(0)
        assert not results, "the lookup has waited for all of it"
        writer.join(DEADLINE_S)
        assert len(results[0].results) == len(items)


def test_what_a_part_was_granted_is_given_back_when_a_later_one_is_refused(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Holder(pool) as holder:
        reserve, calls = pool._store.reserve, [0]

        def refused_later(*args: object) -> object:
            calls[0] += 1
            if calls[0] > 1:
                raise StaleHolderError("fenced meanwhile", next_step="attach again")
            return reserve(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(pool._store, "reserve", refused_later)
        items = tuple(item("a", 0, i) for i in range(PART_ITEMS + 1))
        with pytest.raises(StaleHolderError):
            pool.reserve(api.ReserveRequest(holder.id, holder.attachment.epoch, items), deadline_s=DEADLINE_S)
        assert calls == [2]
        assert pool.status(deadline_s=DEADLINE_S).grant_count == 0
