"""The curator that learns: it stands between the store and a policy.

A lookup costs it next to nothing: it only remembers what was asked. The
:class:`~meshfusion.jbof.policy.medium_policy.MediumPolicy` learns when something is to be written, and when
:meth:`LearningCurator.tend` is called, a bounded piece of work at a time.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.asked import AskedChain, AskedChains, ChainName, policy_keys
from meshfusion.dpu.store.curator import Offer, Scarcity
from meshfusion.dpu.store.learned_groups import LearnedGroup, LearnedGroups, payload_bytes
from meshfusion.dpu.store.members import Members
from meshfusion.dpu.store.segments import Segments
from meshfusion.dpu.store.tidying import Move
from meshfusion.jbof.policy.chain import Chain, Floats, Mask
from meshfusion.jbof.policy.medium_policy import MediumPolicy, Refusal, SegmentStats

TENDED_CHUNKS = 16_384  # a few milliseconds' work
SEGMENT_AS_CHUNKS = 256  # a segment takes as long as so many chunks, whatever is in it
LEARNED_AT_ONCE = 8  # requests, the same: 0.3 ms for one of 400 chunks
ADOPTED_AGE_S = 600.0  # when what was there before was used last, nobody remembers
JUDGED_CHAINS_MAX = 256
"""Of one reservation, by request and KV group: a sixth of a second's work, while lookups wait. What is offered beyond
them is written."""
_OBSERVATIONS_MAX = 1024


class LearningCurator:
    """Asks ``policy``, and tells ``segments`` what each one is worth: tokens saved a second, for each byte of room."""

    def __init__(self, policy: MediumPolicy, segments: Segments) -> None:
        self._policy = policy
        self._segments = segments
        self._asked = AskedChains()
        self._members = Members()
        self._groups = LearnedGroups()
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
            group = self._groups.latest(identity, asked.group)
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
            group = self._groups.of_item(identity, offers[at[0]].item)
            if group is None or any(self._groups.of_item(identity, offers[i].item) is not group for i in at):
                continue
            judged = self._judge(now_s, name, group, [offers[i] for i in at], scarcity)
            for i, lifetime_class in zip(at, judged, strict=True):
                classes[i] = lifetime_class
        # What is not written of one group cannot be resumed at: the others' part of it would be of no use.
        refused = {_boundary(offer) for offer, found in zip(offers, classes, strict=True) if found is None}
        return [None if _boundary(offer) in refused else found for offer, found in zip(offers, classes, strict=True)]

    def _judge(
        self, now_s: float, name: ChainName, group: LearnedGroup, offers: Sequence[Offer], scarcity: Scarcity
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
        for group, at in self._groups.sorted_out(chunks).items():
            keys = policy_keys([chunks[i].key for i in at])
            self._policy.on_found(group.number, keys, group.chunk_tokens, group.chunk_bytes, ADOPTED_AGE_S, now_s)
        for chunk in chunks:
            self._add(chunk, {segment})

    def stored(self, chunks: Iterable[api.ChunkRecord]) -> None:
        chunks = list(chunks)
        for group, at in self._groups.sorted_out(chunks).items():
            self._policy.on_stored(group.number, policy_keys([chunks[i].key for i in at]))
        for chunk in chunks:
            self._add(chunk, _segments_of(chunk))

    def dropped(self, chunk: api.ChunkRecord) -> None:
        group = self._groups.of_chunk(chunk)
        if group is not None:
            self._policy.on_dropped(group.number, policy_keys([chunk.key]))

    def worth_keeping(
        self, now_s: float, chunks: Sequence[api.ChunkRecord], allowed_bytes: int
    ) -> list[api.ChunkRecord]:
        if not chunks or not allowed_bytes:
            return []
        densities = np.zeros(len(chunks))
        for group, at in self._groups.sorted_out(chunks).items():
            keys = policy_keys([chunks[i].key for i in at])
            positions = np.array([chunks[i].position_tokens // chunks[i].token_count for i in at], np.intp)
            densities[at] = self._policy.densities(group.number, keys, positions, now_s)
        sizes = np.array([payload_bytes(chunk) for chunk in chunks], np.float64)
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
            sizes.append(np.full(len(keys), float(self._groups[members.group].chunk_bytes)))
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
        group = self._groups.of_chunk(chunk)
        if group is not None:
            for segment in segments:
                position = chunk.position_tokens // chunk.token_count
                self._members.add(segment, group.number, _short_key(chunk), position)


def _rewritable(sizes: Floats, allowed_bytes: int) -> int:
    """How many of a segment's chunks of these sizes, in bytes, may be written again: half of them at most. A segment of
    which more is worth it is not the one to give up."""
    return min(int(allowed_bytes // sizes.mean()), len(sizes) // 2) if len(sizes) else 0


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
