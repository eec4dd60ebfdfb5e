"""What the store asks about its chunks: are they worth writing, and which segments are worth least?

:class:`LearningCurator` stands between the store and a :class:`~meshfusion.jbof.policy.medium_policy.MediumPolicy`. A
lookup costs it next to nothing: it only remembers what was asked. The policy learns when something is to be written,
and when :meth:`Curator.tend` is called, a bounded piece of work at a time.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.asked import AskedChain, AskedChains, ChainName, policy_keys
from meshfusion.dpu.store.members import Members
from meshfusion.dpu.store.segments import Segments
from meshfusion.dpu.store.tidying import Move
from meshfusion.jbof.policy.chain import Chain, Floats, Mask
from meshfusion.jbof.policy.medium_policy import MediumPolicy, Refusal, SegmentStats

GROUPS_MAX = 64
"""KV groups of all models of the pool that are learned of; each takes memory of its own. Chunks of more are all
written, and are the first to go."""

TENDED_CHUNKS = 16_384  # a few milliseconds' work
SEGMENT_AS_CHUNKS = 256  # a segment takes as long as so many chunks, whatever is in it
LEARNED_AT_ONCE = 32  # requests, the same
ADOPTED_AGE_S = 600.0  # when what was there before was used last, nobody remembers
JUDGED_CHAINS_MAX = 256
"""Of one reservation, by request and KV group: a sixth of a second's work, while lookups wait. What is offered beyond
them is written."""
_OBSERVATIONS_MAX = 1024


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
    """See :class:`WritesEverything` and :class:`LearningCurator`."""

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


@dataclass(frozen=True, slots=True)
class _Group:
    """A KV group of one model, as the policy knows it: its number there, and what its chunks are like."""

    number: int
    chunk_tokens: int
    chunk_bytes: int

    def chain(self, asked: AskedChain) -> Chain:
        """As the policy takes it."""
        skipped = int(asked.numbers[0]) if len(asked.numbers) else 0
        return Chain(self.number, asked.keys, self.chunk_tokens, self.chunk_bytes, len(asked.keys), skipped)


class LearningCurator:
    """Asks ``policy``, and tells ``segments`` what each one is worth: tokens saved a second, for each byte of room."""

    def __init__(self, policy: MediumPolicy, segments: Segments) -> None:
        self._policy = policy
        self._segments = segments
        self._asked = AskedChains()
        self._members = Members()
        self._groups: dict[tuple[bytes, int, int], _Group] = {}  # by identity, KV group, tokens of a chunk
        self._by_number: list[_Group] = []
        self._latest: dict[tuple[bytes, int], _Group] = {}
        self._observations: deque[tuple[float, Chain]] = deque(maxlen=_OBSERVATIONS_MAX)
        self._worths: dict[int, float] = {}
        self._used: set[int] = set()  # to be valued before others
        self._round: deque[int] = deque()  # still to be valued in this round
        self.counters: Counter[str] = Counter()

    # ---- lookups -------------------------------------------------------------------------------------------------

    def asked(self, now_s: float, holder_id: str, identity: bytes, request: api.MatchRequest, chunk_count: int) -> None:
        for asked in request.groups:
            # Of a group that needs only the last chunks before a boundary, those before them are not used.
            first = asked.first_needed[chunk_count - 1] if chunk_count else 0
            numbers = [number for number in range(first, len(asked.keys)) if asked.keys[number]]
            keys = policy_keys([asked.keys[number] for number in numbers])
            name = ChainName(holder_id, request.request_id, asked.group)
            # One that is looked up again is not used twice.
            chain = AskedChain(np.array(numbers, np.intp), keys, is_observed=self._asked.get(name).is_observed)
            group = self._latest.get((identity, asked.group))
            if group is not None and len(keys) and not chain.is_observed:
                self._observations.append((now_s, group.chain(chain)))
                chain = replace(chain, is_observed=True)
            self._asked.put(name, chain)

    def used(self, segments: Iterable[int]) -> None:
        self._used.update(segments)

    def least_worth(self) -> float:
        return min(self._worths.values(), default=0.0)

    def forget_holder(self, holder_id: str) -> None:
        self._asked.forget_holder(holder_id)

    # ---- writes --------------------------------------------------------------------------------------------------

    def admit(
        self, now_s: float, holder_id: str, identity: bytes, offers: Sequence[Offer], scarcity: Scarcity
    ) -> list[int | None]:
        self._learn()
        classes: list[int | None] = [0] * len(offers)
        for (request_id, number), at in islice(_by_chain(offers).items(), JUDGED_CHAINS_MAX):
            name = ChainName(holder_id, request_id, number)
            group = self._group_of(identity, offers[at[0]].item)
            if group is None or any(self._group_of(identity, offers[i].item) is not group for i in at):
                continue
            judged = self._judge(now_s, name, group, [offers[i] for i in at], scarcity)
            for i, lifetime_class in zip(at, judged, strict=True):
                classes[i] = lifetime_class
        # What is not written of one group cannot be resumed at: the others' part of it would be of no use.
        refused = {_boundary(offer) for offer, found in zip(offers, classes, strict=True) if found is None}
        return [None if _boundary(offer) in refused else found for offer, found in zip(offers, classes, strict=True)]

    def _judge(
        self, now_s: float, name: ChainName, group: _Group, offers: Sequence[Offer], scarcity: Scarcity
    ) -> list[int | None]:
        """Of one request and KV group."""
        numbers = np.array([offer.item.position_tokens // group.chunk_tokens for offer in offers], np.intp)
        asked = self._asked.get(name).with_chunks(numbers, policy_keys([offer.item.key for offer in offers]))
        chain = group.chain(asked)
        if not asked.is_observed:
            self._policy.on_match(chain, now_s)
        self._policy.on_computed(chain, now_s)
        wanted = np.flatnonzero([offer.is_wanted for offer in offers])
        places, order = np.unique(asked.places(numbers[wanted]), return_index=True)
        answer = self._policy.admit(chain, places, now_s, scarcity.budget_level, scarcity.room_worth)
        classes: list[int | None] = [0] * len(offers)
        refused_from = asked.refused_from
        for i, refusal, lifetime in zip(wanted[order], answer.refusals, answer.lifetimes, strict=True):
            is_behind = refused_from is not None and numbers[i] > refused_from
            reason = Refusal.ANCESTOR if is_behind else Refusal(refusal)
            classes[i] = int(lifetime) if reason is Refusal.NONE else None
            if reason is not Refusal.NONE:
                self.counters[f"declined_{reason.name.lower()}"] += 1
                refused_from = int(numbers[i]) if refused_from is None else min(refused_from, int(numbers[i]))
        self._asked.put(name, replace(asked, refused_from=refused_from, is_observed=True))
        return classes

    # ---- what is held --------------------------------------------------------------------------------------------

    def adopted(self, now_s: float, segment: int, chunks: Iterable[api.ChunkRecord]) -> None:
        if segment not in self._members:
            self._members.clear(segment)
        # Of a chunk with shards in several segments, this one's turn adds this one.
        chunks = list(chunks)
        for number, at in self._by_group(chunks).items():
            group = self._by_number[number]
            keys = policy_keys([chunks[i].key for i in at])
            self._policy.on_found(number, keys, group.chunk_tokens, group.chunk_bytes, ADOPTED_AGE_S, now_s)
        for chunk in chunks:
            self._add(chunk, {segment})

    def stored(self, chunks: Iterable[api.ChunkRecord]) -> None:
        chunks = list(chunks)
        for number, at in self._by_group(chunks).items():
            self._policy.on_stored(number, policy_keys([chunks[i].key for i in at]))
        for chunk in chunks:
            self._add(chunk, _segments_of(chunk))

    def dropped(self, chunk: api.ChunkRecord) -> None:
        group = self._group_with(chunk)
        if group is not None:
            self._policy.on_dropped(group.number, policy_keys([chunk.key]))

    def worth_keeping(
        self, now_s: float, chunks: Sequence[api.ChunkRecord], allowed_bytes: int
    ) -> list[api.ChunkRecord]:
        if not chunks or not allowed_bytes:
            return []
        densities = np.zeros(len(chunks))
        for number, at in self._by_group(chunks).items():
            keys = policy_keys([chunks[i].key for i in at])
            positions = np.array([chunks[i].position_tokens // chunks[i].token_count for i in at], np.intp)
            densities[at] = self._policy.densities(number, keys, positions, now_s)
        sizes = np.array([_payload_bytes(chunk) for chunk in chunks], np.float64)
        kept = self._policy.keep(densities, _rewritable(sizes, allowed_bytes))
        return [chunks[i] for i in np.argsort(-densities, kind="stable") if kept[i]]

    def moved(self, moves: Iterable[Move]) -> None:
        left: dict[int, set[int]] = {}
        moves = list(moves)
        for move in moves:
            for segment in _segments_of(move.before):
                left.setdefault(segment, set()).add(_short_key(move.before))
        for segment, keys in left.items():
            self._members.discard(segment, keys)
        for move in moves:
            self._add(move.after, _segments_of(move.after))

    def emptied(self, segment: int) -> None:
        worth = self._worths.pop(segment, 0.0)
        if self._members.count_in(segment):
            for members in self._members.by_group(segment):
                self._policy.on_dropped(members.group, members.keys)
            self._policy.victim([SegmentStats(segment, 1, worth, 0)])  # it learns the price of room from these
        self._members.clear(segment)

    def left(self, is_gone: Callable[[int], bool]) -> None:
        for segment in [segment for segment in self._members if is_gone(segment)]:
            for members in self._members.by_group(segment):
                self._policy.on_dropped(members.group, members.keys)
            self._members.forget(segment)
            self._worths.pop(segment, None)

    # ---- in the background ---------------------------------------------------------------------------------------

    def tend(self, now_s: float, allowed_bytes: int) -> bool:
        for _ in range(min(len(self._observations), LEARNED_AT_ONCE)):
            self._learn_one()
        if self._observations:
            return True
        self._policy.refresh_if_due(now_s)
        left = TENDED_CHUNKS
        if not self._round:
            self._round.extend(self._members)
        for _ in range(len(self._used) + len(self._round)):
            if left <= 0:
                break
            segment = self._used.pop() if self._used else self._round.popleft()
            if segment in self._members:
                left -= self._members.count_in(segment) + SEGMENT_AS_CHUNKS
                self._value(segment, now_s, allowed_bytes)
        return False

    def _learn(self) -> None:
        while self._observations:
            self._learn_one()

    def _learn_one(self) -> None:
        asked_s, chain = self._observations.popleft()
        self._policy.on_match(chain, asked_s)

    def _value(self, segment: int, now_s: float, allowed_bytes: int) -> None:
        """What is lost for each byte of room that is gained when what is worth it is written again elsewhere."""
        densities, sizes = [np.zeros(0)], [np.zeros(0)]
        for members in self._members.by_group(segment):
            held = self._policy.is_held(members.group, members.keys)
            keys, positions = members.keys[held], members.positions[held]
            densities.append(self._policy.densities(members.group, keys, positions, now_s))
            sizes.append(np.full(len(keys), float(self._by_number[members.group].chunk_bytes)))
        density, size = np.concatenate(densities), np.concatenate(sizes)
        lost = ~self._policy.keep(density, _rewritable(size, allowed_bytes))
        worth = float((density * size)[lost].sum()) / self._room_bytes(size, ~lost)
        self._segments.valued(segment, worth)
        if self._segments.is_sealed(segment):
            self._worths[segment] = worth

    def _room_bytes(self, sizes: Floats, kept: Mask) -> float:
        """What is gained when a segment is given up and of its chunks the ``kept`` ones are written again. Together
        they take no more than the segment: other shards of theirs lie elsewhere, and one size stands for a group."""
        segment_bytes = self._segments.geometry.segment_bytes
        total_bytes = float(sizes.sum())
        return segment_bytes - float(sizes[kept].sum()) * min(1.0, segment_bytes / max(total_bytes, 1.0))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _add(self, chunk: api.ChunkRecord, segments: Iterable[int]) -> None:
        group = self._group_with(chunk)
        if group is not None:
            for segment in segments:
                position = chunk.position_tokens // chunk.token_count
                self._members.add(segment, group.number, _short_key(chunk), position)

    def _by_group(self, chunks: Sequence[api.ChunkRecord]) -> dict[int, list[int]]:
        """Which of the chunks are of each of the policy's groups."""
        found: dict[int, list[int]] = {}
        for i, chunk in enumerate(chunks):
            group = self._group_with(chunk)
            if group is not None:
                found.setdefault(group.number, []).append(i)
        return found

    def _group_with(self, chunk: api.ChunkRecord) -> _Group | None:
        return self._group(chunk.identity, chunk.group, chunk.token_count, _payload_bytes(chunk))

    def _group_of(self, identity: bytes, item: api.ReserveItem) -> _Group | None:
        payload_bytes = sum(shard.unit_bytes * shard.unit_count for shard in item.shards)
        return self._group(identity, item.group, item.token_count, payload_bytes)

    def _group(self, identity: bytes, number: int, chunk_tokens: int, chunk_bytes: int) -> _Group | None:
        """None: there are more than are learned of. ``chunk_bytes`` may differ a little from chunk to chunk (at the end
        of a window): the first one's stands for all."""
        name = (identity, number, chunk_tokens)
        found = self._groups.get(name)
        if found is None and len(self._by_number) < GROUPS_MAX:
            found = self._groups[name] = _Group(len(self._by_number), chunk_tokens, chunk_bytes)
            self._by_number.append(found)
        if found is not None:
            self._latest[identity, number] = found
        return found


def _rewritable(sizes: Floats, allowed_bytes: int) -> int:
    """How many of a segment's chunks of these sizes, in bytes, may be written again: half of them at most. A segment of
    which more is worth it is not the one to give up."""
    return min(int(allowed_bytes // sizes.mean()), len(sizes) // 2) if len(sizes) else 0


def _payload_bytes(chunk: api.ChunkRecord) -> int:
    return sum(shard.payload_bytes for shard in chunk.shards)


def _segments_of(chunk: api.ChunkRecord) -> set[int]:
    return {shard.extent.segment for shard in chunk.shards}


def _short_key(chunk: api.ChunkRecord) -> int:
    """As :func:`~meshfusion.dpu.store.asked.policy_keys` makes it."""
    return int.from_bytes(chunk.key[:8], sys.byteorder)


def _by_chain(offers: Sequence[Offer]) -> dict[tuple[str, int], list[int]]:
    """Which offers are of one request and KV group."""
    found: dict[tuple[str, int], list[int]] = {}
    for i, offer in enumerate(offers):
        found.setdefault((offer.item.request_id, offer.item.group), []).append(i)
    return found


def _boundary(offer: Offer) -> tuple[str, int]:
    return offer.item.request_id, offer.item.position_tokens
