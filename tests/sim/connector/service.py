"""The pool as a plain model: what it has, who reads it, who may write. Nothing is taken from ``dpu/store``.

It judges what it is asked: chunks must hold what their keys say, bundles come whole, and the boundary it answers with
is the one that follows from what tokens attend to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from meshfusion.dpu.api import types as api
from meshfusion.jbof.errors import ServiceUnavailableError, StaleHolderError
from tests.sim.connector.blocks import must
from tests.sim.connector.medium import HEADER_LBAS, Medium
from tests.sim.connector.names import Content, Name, Names, contents, names_under
from tests.sim.connector.shapes import Shape

TTL_S = 60.0
HEARTBEAT_S = 10.0


class Lease(NamedTuple):
    holder_id: str
    request_id: str
    boundary_tokens: int
    keys: frozenset[bytes]


class Grant(NamedTuple):
    """``siblings``: what was granted together with it and must become visible together with it."""

    holder_id: str
    key: bytes
    item: api.ReserveItem
    extents: tuple[api.Extent, ...]
    siblings: set[str]


class Asking(NamedTuple):
    """For whom a lookup is: the service is not told, the model has to know."""

    text: str
    token_count: int


class SimService:
    def __init__(self, rng: random.Random, shape: Shape, identity: bytes, seen: Counter[str]) -> None:
        self.rng = rng
        self.shape = shape
        self.seen = seen
        self.now_s = 0.0
        self.is_away = False
        self.no_space_rate = 0.0
        self.asking: Asking | None = None
        self.run_lengths: tuple[int, ...] = ()  # how the items of the next reservation belong together
        self.eras = {identity: 0}
        self.identity_of: dict[str, bytes] = {}  # of holders that are known
        self.heard_s: dict[str, float] = {}
        self.chunks: dict[bytes, api.ChunkRecord] = {}
        self.medium = Medium()
        self.leases: dict[str, Lease] = {}
        self.grants: dict[str, Grant] = {}
        self.doubtful: set[str] = set()  # grants whose write may still land
        self.writing: Counter[str] = Counter()  # by grant: workers that are writing under it
        self._count = 0

    # ---- what a client asks --------------------------------------------------------------------------------------

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        self._reach()
        holder_id = self._new_id("h")
        self.identity_of[holder_id] = request.identity
        self.heard_s[holder_id] = self.now_s
        return api.Attachment("pool", holder_id, 1, (), "", TTL_S, TTL_S, HEARTBEAT_S)

    def match(self, request: api.MatchRequest, *, deadline_s: float) -> api.MatchReply:
        identity = self._known(request.holder_id)
        count = next(
            (n for n in range(len(request.groups[0].keys), 0, -1) if self._can_resume(identity, request, n)), 0
        )
        assert self.asking is not None
        wanted = 0  # if asked under a former identity: before a reset
        if any(key in self._names(identity).of_key for keys in request.groups for key in keys.keys):
            wanted = self.boundary(identity, self.asking.text, self.asking.token_count)
        must(count == wanted, "a lookup finds another boundary than there is", count, wanted)
        if not count:
            return api.MatchReply("", 0, ())
        keys = [
            keys.keys[i] for keys in request.groups for i in range(keys.first_needed[count - 1], count) if keys.keys[i]
        ]
        lease_id = self._new_id("l")
        boundary_tokens = count * self.shape.chunk_tokens
        self.leases[lease_id] = Lease(request.holder_id, request.request_id, boundary_tokens, frozenset(keys))
        self.seen["hits"] += 1
        return api.MatchReply(lease_id, count, tuple(self.chunks[key] for key in keys))

    def release(self, request: api.ReleaseRequest, *, deadline_s: float) -> None:
        self._known(request.holder_id)
        for lease_id in request.lease_ids:
            self.leases.pop(lease_id, None)

    def reserve(self, request: api.ReserveRequest, *, deadline_s: float) -> api.ReserveReply:
        identity = self._known(request.holder_id)
        results: list[api.ReserveResult] = []
        siblings: dict[tuple[int, str], set[str]] = {}
        must(sum(self.run_lengths) == len(request.items), "places asked for that no run wants")
        run_of = [run for run, length in enumerate(self.run_lengths) for _ in range(length)]
        for run, item in zip(run_of, request.items, strict=True):
            name = self._names(identity).of_key.get(item.key)
            must(name is not None, "a place asked for a chunk that is none of the texts'", item)
            assert name is not None
            must(name.group == item.group, "a place asked under another group's key", item)
            must(name.number * self.shape.chunk_tokens == item.position_tokens, "a place at another position", item)
            results.append(self._reserve_one(request.holder_id, item, siblings.setdefault((run, name.text), set())))
        return api.ReserveReply(tuple(results))

    def commit(self, request: api.CommitRequest, *, deadline_s: float) -> api.CommitReply:
        identity = self._known(request.holder_id)
        bundles: dict[int, set[str]] = {}
        for i, item in enumerate(request.items):
            bundles.setdefault(item.bundle or -1 - i, set()).add(item.grant_id)
        whole = {b for b, ids in bundles.items() if all(self._is_granted(request.holder_id, i) for i in ids)}
        committed = []
        for i, item in enumerate(request.items):
            bundle = item.bundle or -1 - i
            if bundle in whole:
                must(self.grants[item.grant_id].siblings == bundles[bundle], "a bundle was committed in part", item)
                self._show(identity, item)
            committed.append(bundle in whole)
        for item in request.items:
            self._drop_grant(item.grant_id)
        self.seen["commits"] += sum(committed)
        self.seen["commits refused"] += len(committed) - sum(committed)
        return api.CommitReply(tuple(committed))

    def abort(self, request: api.AbortRequest, *, deadline_s: float) -> None:
        self._known(request.holder_id)
        for grant_id in request.grant_ids:
            must(grant_id not in self.doubtful, "a place was given back whose write may still land", grant_id)
            must(not self.writing[grant_id], "a place was given back that is being written", grant_id)
            grant = self.grants.get(grant_id)
            if grant is not None:
                self._drop_grant(grant_id)
                self._give_back(grant.extents)
        for grant_id in request.doubtful_grant_ids:
            must(grant_id in self.doubtful, "a write was said to be in doubt that is not", grant_id)

    def heartbeat(self, request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        self._known(request.holder_id)
        held = {lease_id for lease_id, lease in self.leases.items() if lease.holder_id == request.holder_id}
        return api.HeartbeatReply(tuple(lease_id for lease_id in request.lease_ids if lease_id not in held))

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        self._known(request.holder_id)
        record = self.chunks.get(request.key)
        if record is None or record.shards[0].extent != request.extent:
            return False
        del self.chunks[request.key]
        self.seen["drops"] += 1
        return True

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        self._known(request.holder_id)
        self.forget_holder(request.holder_id)

    def close(self) -> None:
        pass

    # ---- what happens to it --------------------------------------------------------------------------------------

    def pass_time(self, now_s: float) -> None:
        """Who was silent for too long is fenced, and holds nothing any more."""
        self.now_s = now_s
        if any(now_s - heard_s > TTL_S for heard_s in self.heard_s.values()):
            for holder_id in [h for h, heard_s in self.heard_s.items() if now_s - heard_s > TTL_S]:
                self.forget_holder(holder_id)

    def forget_holder(self, holder_id: str) -> None:
        del self.identity_of[holder_id], self.heard_s[holder_id]
        for lease_id in [i for i, lease in self.leases.items() if lease.holder_id == holder_id]:
            del self.leases[lease_id]
        for grant_id in [i for i, grant in self.grants.items() if grant.holder_id == holder_id]:
            self._drop_grant(grant_id)
            self.doubtful.discard(grant_id)

    def restart(self) -> None:
        """Leases live in memory; whoever was known has to attach again, and is fenced."""
        for holder_id in list(self.heard_s):
            self.forget_holder(holder_id)
        self.seen["service restarts"] += 1

    def is_known(self, holder_id: str) -> bool:
        """Else it has been cut off."""
        return holder_id in self.identity_of

    def lose_lease(self) -> None:
        if self.leases:
            del self.leases[self.rng.choice(list(self.leases))]
            self.seen["leases lost"] += 1

    def lapse_grant(self) -> None:
        """It took too long. The place stays taken until its holder has been cut off."""
        live = [grant_id for grant_id in self.grants if grant_id not in self.doubtful]
        if live:
            del self.grants[self.rng.choice(live)]
            self.seen["grants lapsed"] += 1

    def rot(self) -> None:
        """The medium answers with other bytes than were written."""
        if self.chunks:
            record = self.rng.choice(list(self.chunks.values()))
            self.medium.spoil(self.rng.choice(record.shards).extent)
            self.seen["rotten chunks"] += 1

    def evict(self) -> None:
        """Anything that nobody reads. Its place may be written again at once."""
        leased = {key for lease in self.leases.values() for key in lease.keys}
        loose = [key for key in self.chunks if key not in leased]
        if loose:
            record = self.chunks.pop(self.rng.choice(loose))
            self._give_back(shard.extent for shard in record.shards)
            self.seen["evictions"] += 1

    def save_as_another(self, identity: bytes, text: str, boundary: int) -> None:
        """Another engine's chunks; of what is needed only at some boundaries, not always all."""
        names, chunk_tokens = self._names(identity), self.shape.chunk_tokens
        for name in names.of_text[text]:
            key = names.key_of[name]
            if name.number >= boundary or key in self.chunks or self._is_being_written(key):
                continue
            sizes = self.shape.form.shards_of(name.group, name.number)
            if sizes[0].unit_count and (not name.group or self.rng.random() < 0.9):
                item = api.ReserveItem(key, name.group, name.number * chunk_tokens, chunk_tokens, sizes)
                extents = self._places(item)
                units = self._contents(identity, name, item)
                for extent, of_shard in zip(extents, units, strict=True):
                    self.medium.write(extent, of_shard)
                self._record(identity, item, extents, units)

    # ---- what the model knows ------------------------------------------------------------------------------------

    def boundary(self, identity: bytes, text: str, token_count: int) -> int:
        """The longest boundary, in chunks, at which every group finds what its next token attends to."""
        names = self._names(identity)
        for boundary in range(self.shape.boundary_max(token_count), 0, -1):
            if all(self._has(names, group, text, boundary) for group in range(len(self.shape.groups))):
                return boundary
        return 0

    def _has(self, names: Names, group_index: int, text: str, boundary: int) -> bool:
        group, chunk_tokens = self.shape.groups[group_index], self.shape.chunk_tokens
        end, size = boundary * chunk_tokens, group.block_tokens
        for block in range(group.first_seen(end) // size, end // size):
            chunk_end = (block * size // chunk_tokens + 1) * chunk_tokens
            record = self.chunks.get(names.key_of[Name(group_index, chunk_end // chunk_tokens - 1, text[:chunk_end])])
            if record is None or block < chunk_end // size - len(record.shards[0].unit_digests):
                return False
        return True

    # ---- inside --------------------------------------------------------------------------------------------------

    def _names(self, identity: bytes) -> Names:
        return names_under(identity, self.shape)

    def _reach(self) -> None:
        if self.is_away:
            raise ServiceUnavailableError("away", next_step="wait")

    def _known(self, holder_id: str) -> bytes:
        self._reach()
        identity = self.identity_of.get(holder_id)
        if identity is None:
            raise StaleHolderError("unknown holder", next_step="attach")
        self.heard_s[holder_id] = self.now_s
        return identity

    def _can_resume(self, identity: bytes, request: api.MatchRequest, boundary: int) -> bool:
        for keys in request.groups:
            for key in keys.keys[keys.first_needed[boundary - 1] : boundary]:
                record = self.chunks.get(key) if key else None
                if key and (record is None or record.identity != identity):
                    return False
        return True

    def _reserve_one(self, holder_id: str, item: api.ReserveItem, siblings: set[str]) -> api.ReserveResult:
        if item.key in self.chunks:
            return api.ReserveResult(api.ReserveOutcome.EXISTS)
        if self._is_being_written(item.key):
            self.seen["busy"] += 1
            return api.ReserveResult(api.ReserveOutcome.BUSY)
        if self.no_space_rate and self.rng.random() < self.no_space_rate:
            self.seen["no space"] += 1
            return api.ReserveResult(api.ReserveOutcome.NO_SPACE)
        grant_id = self._new_id("g")
        siblings.add(grant_id)
        must(len(item.shards) == self.shape.shard_count(item.group), "places for another number of shards", item)
        extents = self._places(item)
        self.grants[grant_id] = Grant(holder_id, item.key, item, extents, siblings)
        return api.ReserveResult(api.ReserveOutcome.GRANTED, grant_id, extents)

    def _places(self, item: api.ReserveItem) -> tuple[api.Extent, ...]:
        return tuple(self.medium.place(size.unit_count) for size in item.shards)

    def _give_back(self, extents: Iterable[api.Extent]) -> None:
        for extent in extents:
            self.medium.give_back(extent)

    def _contents(self, identity: bytes, name: Name, item: api.ReserveItem) -> tuple[tuple[Content, ...], ...]:
        """Of each shard."""
        return tuple(
            contents(self.shape, name, self.eras[identity], size.unit_count, shard)
            for shard, size in enumerate(item.shards)
        )

    def _is_being_written(self, key: bytes) -> bool:
        return any(grant.key == key for grant in self.grants.values())

    def _is_granted(self, holder_id: str, grant_id: str) -> bool:
        grant = self.grants.get(grant_id)
        return grant is not None and grant.holder_id == holder_id

    def _drop_grant(self, grant_id: str) -> None:
        self.grants.pop(grant_id, None)

    def _show(self, identity: bytes, item: api.CommitItem) -> None:
        """From now on it is found: then it holds what its key says."""
        grant = self.grants[item.grant_id]
        must(item.grant_id not in self.doubtful, "a chunk was committed whose write is in doubt", item)
        name = self._names(identity).of_key[grant.key]
        units: Any = item.unit_digests
        wanted = self._contents(identity, name, grant.item)
        must(units == wanted, "wrong content was committed", name, units, wanted)
        on_medium: Any = tuple(self.medium.read(extent) for extent in grant.extents)
        must(on_medium == units, "a chunk was committed that is not on the medium", name, on_medium)
        self._record(identity, grant.item, grant.extents, units)

    def _record(self, identity: bytes, item: api.ReserveItem, extents: tuple[api.Extent, ...], units: Any) -> None:
        """``units``: of each shard."""
        shards = tuple(
            api.Shard(size.rank, extent, HEADER_LBAS, 1, size.unit_bytes, of_shard)
            for size, extent, of_shard in zip(item.shards, extents, units, strict=True)
        )
        self.chunks[item.key] = api.ChunkRecord(
            item.key, identity, "default", item.group, item.position_tokens, item.token_count, shards
        )

    def _new_id(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"
