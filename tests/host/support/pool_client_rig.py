"""A pool client with the events it has told, and short words for what tests ask of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from meshfusion.dpu.api import types as api
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import (
    Attached,
    Event,
    GrantedRun,
    Matched,
    Reserved,
    ReserveFailed,
    ReserveWish,
)
from tests.host.support.chunk_records import number_key, one_group
from tests.host.support.controlled_service import ControlledService
from tests.host.support.waiting import until

IDENTITY = b"\x11" * 32
OTHER_IDENTITY = b"\x22" * 32
CHUNK_TOKENS = 64
FORM = one_group(block_tokens=16, blocks_per_chunk=4)
SHARD = api.ShardSize(0, 32_768, 4)
E = TypeVar("E")


def make_client(service: api.ChunkService) -> PoolClient:
    return PoolClient(service, identity=IDENTITY, engine_version="0.32.0", form=FORM)


class Rig:
    def __init__(self, service: api.ChunkService) -> None:
        self.client = make_client(service)
        self.attachment = self.client.start()
        self.events: list[Event] = []

    def expect(self, kind: type[E] | tuple[type[E], ...], match: Callable[[E], bool] = lambda event: True) -> E:
        """The next event of ``kind``; others stay."""

        def look() -> E | None:
            self.events += self.client.take_events()
            for event in self.events:
                if isinstance(event, kind) and match(event):
                    self.events.remove(event)
                    return event
            return None

        found = until(look, what=f"for {kind}")
        assert found is not None
        return found

    def match(self, keys: tuple[bytes, ...] | None, *, attempt: int = 1, deadline_s: float = 5.0) -> Matched:
        self.client.match("r", attempt, lambda: asked(keys), time.monotonic() + deadline_s)
        return self.expect(Matched, lambda event: event.attempt == attempt)


@contextlib.contextmanager
def attached(service: api.ChunkService) -> Iterator[Rig]:
    rig = Rig(service)
    try:
        first = rig.expect(Attached)
        assert first.attachment == rig.attachment
        yield rig
    finally:
        if isinstance(service, ControlledService):
            service.fails.clear()
            for hold in service.holds.values():
                hold.set()
        rig.client.close()


def asked(keys: tuple[bytes, ...] | None) -> tuple[api.GroupKeys, ...] | None:
    """For an engine with full attention alone."""
    return None if keys is None else (api.GroupKeys(0, keys, (0,) * len(keys)),)


def keys(count: int) -> tuple[bytes, ...]:
    return tuple(number_key(i) for i in range(count))


def wish(
    run_id: int, *numbers: int, identity: bytes = IDENTITY, first_index: int = 0, has_keys: bool = True
) -> ReserveWish:
    """For the chunks with these numbers; for the one with the run's number when there are none."""
    made = tuple(number_key(number) for number in numbers or (run_id,))
    indexes = tuple(range(first_index, first_index + len(made)))
    return ReserveWish(
        run_id, f"request-{run_id}", identity, (0,) * len(made), indexes, lambda: made if has_keys else None
    )


def reserve(rig: Rig, *wishes: ReserveWish) -> list[Reserved | ReserveFailed]:
    """The answers, in the order of the wishes."""
    rig.client.reserve(wishes)
    answers: dict[int, Reserved | ReserveFailed] = {}
    for _ in wishes:
        answer: Any = rig.expect((Reserved, ReserveFailed))
        assert answer.run_id not in answers
        answers[answer.run_id] = answer
    return [answers[wish.run_id] for wish in wishes]


def granted(answer: Reserved | ReserveFailed) -> GrantedRun:
    assert isinstance(answer, Reserved)
    assert answer.granted is not None
    return answer.granted


def grant(holder_id: str, *grant_ids: str, epoch: int = 1) -> GrantedRun:
    """As if these grants had been given, for one chunk each."""
    count = len(grant_ids)
    extents = ((1, 0, 256, 9, 1),) * count
    return GrantedRun(holder_id, epoch, IDENTITY, tuple(range(count)), keys(count), grant_ids, extents, (0,) * count)


UNITS = (b"d" * 8,) * 4
