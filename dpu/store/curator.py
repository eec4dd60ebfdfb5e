"""What the store asks about its chunks: are they worth writing, and which segments are worth least?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.tidying import Move


class Offer(NamedTuple):
    """An item of a reservation. ``is_wanted``: nobody has stored it nor is writing it."""

    item: api.ReserveItem
    is_wanted: bool


class Scarcity(NamedTuple):
    """``budget_level``: how much of the writes is left, 0 to 1. ``room_worth``: of the segment that would go next, as
    its curator has valued it; 0 while there is room."""

    budget_level: float
    room_worth: float


class Curator(Protocol):
    """See :class:`WritesEverything` and :class:`~meshfusion.dpu.store.learning_curator.LearningCurator`."""

    @property
    def counters(self) -> Counter[str]:
        """What was done, by name."""

    def asked(self, now_s: float, holder_id: str, identity: bytes, request: api.MatchRequest, chunk_count: int) -> None:
        """A request was looked up, and ``chunk_count`` of its chunks were found."""

    def admit(
        self, now_s: float, holder_id: str, identity: bytes, offers: Sequence[Offer], scarcity: Scarcity
    ) -> list[int | None]:
        """The lifetime class of each offer, None for one that is not worth a write."""

    def adopted(self, now_s: float, segment: int, chunks: Iterable[api.ChunkRecord]) -> None:
        """In this segment lie these chunks and no others, since an earlier life of the service."""

    def stored(self, chunks: Iterable[api.ChunkRecord]) -> None:
        """These are on the medium now."""

    def dropped(self, chunk: api.ChunkRecord) -> None:
        """This one counts no more."""

    def worth_keeping(
        self, now_s: float, chunks: Sequence[api.ChunkRecord], allowed_bytes: int
    ) -> list[api.ChunkRecord]:
        """Those of a segment that is given up which are worth writing again, of ``allowed_bytes`` together at most; the
        most valuable ones first."""

    def moved(self, moves: Iterable[Move]) -> None:
        """These chunks lie elsewhere now."""

    def emptied(self, segment: int) -> None:
        """Nothing that was in it counts any more."""

    def left(self, is_gone: Callable[[int], bool]) -> None:
        """Such segments have left the pool, with what was in them."""

    def used(self, segments: Iterable[int]) -> None:
        """Chunks in these are being read."""

    def least_worth(self) -> float:
        """About that of the segment that goes next; 0 while none is valued."""

    def forget_holder(self, holder_id: str) -> None: ...

    def tend(self, now_s: float, allowed_bytes: int) -> bool:
        """Learn, and value some segments anew: a bounded piece of work, to be called now and then; at once again where
        it returns True. ``allowed_bytes``: that may be written again now."""


class WritesEverything:
    """All that is offered is written, and the segment used longest ago goes first."""

    @property
    def counters(self) -> Counter[str]:
        return Counter()

    def asked(self, now_s: float, holder_id: str, identity: bytes, request: api.MatchRequest, chunk_count: int) -> None:
        pass

    def admit(
        self, now_s: float, holder_id: str, identity: bytes, offers: Sequence[Offer], scarcity: Scarcity
    ) -> list[int | None]:
        return [0] * len(offers)

    def adopted(self, now_s: float, segment: int, chunks: Iterable[api.ChunkRecord]) -> None:
        pass

    def stored(self, chunks: Iterable[api.ChunkRecord]) -> None:
        pass

    def dropped(self, chunk: api.ChunkRecord) -> None:
        pass

    def worth_keeping(
        self, now_s: float, chunks: Sequence[api.ChunkRecord], allowed_bytes: int
    ) -> list[api.ChunkRecord]:
        return []

    def moved(self, moves: Iterable[Move]) -> None:
        pass

    def emptied(self, segment: int) -> None:
        pass

    def left(self, is_gone: Callable[[int], bool]) -> None:
        pass

    def used(self, segments: Iterable[int]) -> None:
        pass

    def least_worth(self) -> float:
        return 0.0

    def forget_holder(self, holder_id: str) -> None:
        pass

    def tend(self, now_s: float, allowed_bytes: int) -> bool:
        return False
