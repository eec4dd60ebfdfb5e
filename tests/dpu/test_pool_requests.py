"""Whatever a well-formed message says, a pool with a learned policy answers it or refuses it with a reason: none is an
error inside the service, and none ends a thread that others need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import MAX_INT
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.jbof.errors import MeshFusionError, ServiceError
from tests.dpu.pool_cases import DEADLINE_S, UNIT_BYTES, Holder, key, make_pool

SIZES = (api.ShardSize(0, UNIT_BYTES, 1),)
DIGEST = b"8 bytes!"
THREADS = {"meshfusion-index", "meshfusion-tick", "meshfusion-tidy", "meshfusion-drives"}


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool", PoolOptions(free_fraction=0.5)) as pool, Holder(pool) as holder:
        yield holder


def reserve(holder: Holder, *items: api.ReserveItem) -> tuple[api.ReserveResult, ...]:
    request = api.ReserveRequest(holder.id, holder.attachment.epoch, items)
    return holder.pool.reserve(request, deadline_s=DEADLINE_S).results


def commit(holder: Holder, results: tuple[api.ReserveResult, ...]) -> tuple[bool, ...]:
    """As if all had been written."""
    granted = [result for result in results if result.grant_id]
    units = [[(extent.lba_count - 1) * 4096 // UNIT_BYTES for extent in result.extents] for result in granted]
    items = tuple(
        api.CommitItem(result.grant_id, tuple((DIGEST,) * count for count in counts))
        for result, counts in zip(granted, units, strict=True)
    )
    request = api.CommitRequest(holder.id, holder.attachment.epoch, items)
    return holder.pool.commit(request, deadline_s=DEADLINE_S).committed


@pytest.mark.parametrize("position_tokens", [2**32, 2**40, MAX_INT])
def test_a_chunk_that_claims_to_lie_very_far_behind_is_one_like_others(holder: Holder, position_tokens: int) -> None:
    far = api.ReserveItem(key(1), 0, position_tokens, 1, SIZES, request_id="r")
    assert commit(holder, reserve(holder, far)) == (True,)
    assert holder.put(2), "and others can be saved"


def test_what_goes_wrong_behind_one_transaction_does_not_hold_up_the_next(
    holder: Holder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise OverflowError("as of a bug")

    assert isinstance(holder.pool, Pool)
    with monkeypatch.context() as patch:
        patch.setattr(holder.pool._store._curator, "stored", fail)
        assert holder.put(1), "it is durable"
    assert "what follows from it failed" in caplog.text
    assert holder.put(2)
    assert holder.match_alone(1).chunks


def test_what_no_position_can_be_is_refused(holder: Holder) -> None:
    with pytest.raises(ServiceError, match="out of range"):
        reserve(holder, api.ReserveItem(key(1), 0, MAX_INT + 1, 1, SIZES))


positions = st.one_of(st.integers(0, 200), st.integers(0, MAX_INT))
items = st.builds(
    api.ReserveItem,
    st.integers(0, 30).map(key),
    st.integers(0, 3),
    positions,
    st.one_of(st.sampled_from([1, 16, 17]), st.integers(1, MAX_INT)),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(
        lambda units: tuple(api.ShardSize(rank, UNIT_BYTES, count) for rank, count in enumerate(units))
    ),
    request_id=st.sampled_from(["", "a", "b"]),
)
reserves = st.lists(items, max_size=8).map(tuple)


@st.composite
def lookups(draw: st.DrawFn) -> tuple[api.GroupKeys, ...]:
    count = draw(st.integers(0, 6))
    groups = []
    for number in draw(st.sets(st.integers(0, 3), max_size=3)):
        first = draw(st.integers(0, count))
        keys = tuple(b"" if i < first else key(draw(st.integers(0, 30))) for i in range(count))
        groups.append(api.GroupKeys(number, keys, tuple(min(first, i + 1) for i in range(count))))
    return tuple(groups)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.one_of(reserves, lookups(), st.sampled_from(["tend", "tidy", "abort"])), max_size=12))
def test_no_request_is_an_error_inside_the_service(
    tmp_path_factory: pytest.TempPathFactory, steps: list[object]
) -> None:
    path = tmp_path_factory.mktemp("requests") / "pool"
    make_pool(path)
    with Pool.open(path, PoolOptions(free_fraction=0.5)) as pool, Holder(pool) as holder:
        for number, step in enumerate(steps):
            with contextlib.suppress(MeshFusionError):
                carry_out(pool, holder, step, number)
        assert {thread.name for thread in threading.enumerate()} >= THREADS


def carry_out(pool: Pool, holder: Holder, step: object, number: int) -> None:
    if step == "tend":
        with pool._mutex:
            pool._store.tend(pool._clock())
    elif step == "tidy":
        pool._parts.tidier.tidy_one()
    elif step == "abort":
        results = reserve(holder, api.ReserveItem(key(number), 0, 0, 16, SIZES, request_id="a"))
        grant_ids = tuple(result.grant_id for result in results if result.grant_id)
        pool.abort(api.AbortRequest(holder.id, holder.attachment.epoch, grant_ids), deadline_s=DEADLINE_S)
    elif isinstance(step, tuple) and all(isinstance(one, api.ReserveItem) for one in step):
        commit(holder, reserve(holder, *step))
    elif isinstance(step, tuple):
        request = api.MatchRequest(holder.id, f"asked {number % 3}", 16, step)
        holder.release(pool.match(request, deadline_s=DEADLINE_S))
