"""Value types of the chunk service, shared by the service and its clients.

Times are seconds on the service's monotonic clock unless a name says otherwise. Keys, identities and
digests are raw bytes. Nothing here does I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

KEY_BYTES = 32
IDENTITY_BYTES = 32
UNIT_DIGEST_BYTES = 8
API_VERSION = 3  # 3: items of a reservation name their request, and may be declined


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of logical blocks of one namespace, valid under one generation of its segment (rule 2)."""

    namespace: int
    segment: int
    lba: int
    lba_count: int
    generation: int


@dataclass(frozen=True, slots=True)
class ShardSize:
    """What one rank will write for a chunk: ``unit_count`` units (blocks) of ``unit_bytes`` each. Ranks above ``rank``
    and below that of the next shard hold the same bytes: they read this shard, and write none."""

    rank: int
    unit_bytes: int
    unit_count: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a committed chunk.

    ``extent`` starts with the chunk header; unit ``i`` starts ``payload_lba_offset + i * unit_lba_count``
    logical blocks into it and is ``unit_bytes`` long. ``unit_digests[i]`` proves unit ``i`` (rule 4).
    """

    rank: int
    extent: Extent
    payload_lba_offset: int
    unit_lba_count: int
    unit_bytes: int
    unit_digests: tuple[bytes, ...]

    @property
    def payload_bytes(self) -> int:
        return self.unit_bytes * len(self.unit_digests)


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A committed chunk as the index knows it.

    ``position_tokens`` is the absolute token offset of the chunk's first token: the same bytes at another
    position are wrong, so readers compare it.
    """

    key: bytes
    identity: bytes
    tenant: str
    group: int
    position_tokens: int
    token_count: int
    shards: tuple[Shard, ...]


class Access(enum.Enum):
    """How a holder reaches the data, and with that how it is cut off (rule 3)."""

    LOCAL = "local"  # it opens the data itself, on the service's machine
    NVMEOF = "nvmeof"  # as a host of an NVMe-oF target, with an NQN of its own


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """An engine's incarnation introduces itself: all its workers, ``rank_count`` of them, are one holder.
    ``incarnation`` is never reused (a uuid4 in hex)."""

    incarnation: str
    engine_kind: str
    engine_version: str
    host: str
    pid: int
    identity: bytes
    rank_count: int
    tenant: str = "default"
    api_version: int = API_VERSION
    handoff_token: str = ""
    access: Access = Access.LOCAL


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace. ``path``: where a holder with local access opens it; empty for others.

    ``lba_bytes``, ``lba_count``: as extents count, whatever blocks the device itself has.
    """

    nsid: int
    path: str
    lba_bytes: int
    lba_count: int


@dataclass(frozen=True, slots=True)
class Portal:
    """Where an NVMe-oF target listens. ``service``: the port, of TCP or of the RDMA connection manager."""

    transport: str
    address: str
    service: int


@dataclass(frozen=True, slots=True)
class Export:
    """What an NVMe-oF host connects to, and as whom: ``host_nqn`` belongs to this incarnation alone (rule 3).

    ``host_key``: with what it authenticates itself, as ``DHHC-1:`` text; empty when the target does not ask.
    ``tls_psk``: with what its TCP connections are encrypted, as ``NVMeTLSkey-1:`` text; empty: they are not.
    """

    subsystem_nqn: str
    host_nqn: str
    portals: tuple[Portal, ...]
    host_key: str = field(default="", repr=False)
    tls_psk: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a holder needs to move data itself, by local access or through ``export``.

    ``liveness_path``: with local access, hold a shared flock on it to write; empty with ``export``.
    ``drives_version``: of ``namespaces``: when a heartbeat is answered with another one, attaching again as the same
    incarnation tells how to reach the drives from then on. Of ``export`` that holder gets places, and is told of
    chunks, on the drives alone that it says it has :class:`Reached`; until it says so first, on ``namespaces``.
    """

    pool_uuid: str
    holder_id: str
    epoch: int
    namespaces: tuple[Namespace, ...]
    liveness_path: str
    lease_ttl_s: float
    grant_ttl_s: float
    heartbeat_s: float
    export: Export | None = None
    drives_version: int = 0


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The chunks of one KV group of a request, from token 0 on; all groups of a request have equally many.

    ``keys[i]``: of chunk ``i``; b"" where the group stores nothing of it, and nothing may need it then.
    ``first_needed[i]``: to resume after chunk ``i`` this group's chunks ``first_needed[i]`` to ``i`` must be there;
    ``i + 1`` when none must. Never decreases.
    """

    group: int
    keys: tuple[bytes, ...]
    first_needed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatchRequest:
    """After how many leading chunks can all ``groups`` resume? Answered with a lease on what that takes."""

    holder_id: str
    request_id: str
    chunk_tokens: int
    groups: tuple[GroupKeys, ...]


@dataclass(frozen=True, slots=True)
class MatchReply:
    """``chunk_count``: the longest boundary, in chunks, at which all groups can resume; ``chunks``: those needed there,
    by group in the order asked and then by position; leased. 0, () and "" when there is none."""

    lease_id: str
    chunk_count: int
    chunks: Sequence[ChunkRecord]


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    holder_id: str
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReserveItem:
    """``request_id``: as it was named in its lookup; the chunk is judged by what that asked for. Empty: unknown."""

    key: bytes
    group: int
    position_tokens: int
    token_count: int
    shards: tuple[ShardSize, ...]
    copies: int = 1
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    holder_id: str
    epoch: int
    items: tuple[ReserveItem, ...]


class ReserveOutcome(enum.Enum):
    GRANTED = "granted"
    EXISTS = "exists"  # already committed: nothing to do
    BUSY = "busy"  # another writer holds a grant for this key: nothing to do (no convoy)
    NO_SPACE = "no_space"  # nothing reclaimable now: drop the save
    DECLINED = "declined"  # not worth a write now: drop the save; it may be when it is used again


@dataclass(frozen=True, slots=True)
class ReserveResult:
    outcome: ReserveOutcome
    grant_id: str = ""
    extents: tuple[Extent, ...] = ()  # one per shard of the item, in its order


@dataclass(frozen=True, slots=True)
class ReserveReply:
    results: tuple[ReserveResult, ...]  # one per item, in order


@dataclass(frozen=True, slots=True)
class CommitItem:
    """Sent only after the data and a flush completed (rule 1). Digests per shard, per unit.

    ``bundle``: items of one request with the same one become visible in one transaction, or none of them does; with 0
    each is on its own.
    """

    grant_id: str
    unit_digests: tuple[tuple[bytes, ...], ...]
    bundle: int = 0


@dataclass(frozen=True, slots=True)
class CommitRequest:
    holder_id: str
    epoch: int
    items: tuple[CommitItem, ...]


@dataclass(frozen=True, slots=True)
class CommitReply:
    """``committed[i]``: is item ``i`` now visible? False: its grant, or that of another item of its bundle, had expired
    or was unknown; the grants of the others of such a bundle are given back."""

    committed: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The holder promises that no write under ``grant_ids`` is outstanding.

    ``doubtful_grant_ids``: writes under these may still land (rule 3). They are never committed; their space stays
    quarantined until the holder is fenced, and others may write the same chunks elsewhere meanwhile.
    """

    holder_id: str
    epoch: int
    grant_ids: tuple[str, ...]
    doubtful_grant_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """The namespaces that all workers of a holder have opened and proven, of those named with ``drives_version``."""

    drives_version: int
    namespaces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    """``reached``: None from a holder that does not say it: one of an earlier version, or one that has not opened
    anything yet. ``host_key_id``: of the key that a host of an export has
    (:func:`~meshfusion.jbof.nvme.auth_keys.key_id`), by which the service learns that it takes new ones; empty with
    local access, and from engines of earlier releases."""

    holder_id: str
    epoch: int
    lease_ids: tuple[str, ...]
    reached: Reached | None = None
    host_key_id: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """``drives_version``: see :class:`Attachment`. ``is_draining``: the service is about to stop; whoever holds
    something ends it and asks for nothing new. ``host_key``: in the place of :attr:`Export.host_key` from the next
    connection on; empty: that one stays."""

    lost_lease_ids: tuple[str, ...]
    drives_version: int = 0
    is_draining: bool = False
    host_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class DropRequest:
    """A load did not match its digest: forget this chunk, if it still lies at this extent."""

    holder_id: str
    key: bytes
    extent: Extent
    reason: str


@dataclass(frozen=True, slots=True)
class DetachRequest:
    """The holder leaves; it promises that no write is outstanding."""

    holder_id: str


@dataclass(frozen=True, slots=True)
class ListRequest:
    """Chunks in key order after ``after_key`` (b"" for the start), at most ``limit``."""

    after_key: bytes = b""
    limit: int = 100
    identity: bytes = b""


@dataclass(frozen=True, slots=True)
class ListReply:
    chunks: tuple[ChunkRecord, ...]
    next_after_key: bytes  # b"" when this page is the last


@dataclass(frozen=True, slots=True)
class HolderStatus:
    holder_id: str
    engine_kind: str
    engine_version: str
    host: str
    pid: int
    lease_count: int
    grant_count: int
    silent_s: float
    # "live", "silent" (no heartbeat, not fenced yet), "former" (from an earlier epoch), "condemned" (being cut off)
    state: str
    access: str = Access.LOCAL.value


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Everything ``mfctl pool status`` prints. ``segments_*`` add up to ``segment_count``. ``oldest_grant_s``: how long
    ago the oldest grant was given whose fate is not known, ``oldest_lease_s``: the oldest lease; 0 while there is none.
    ``transactions_pending``: of the index, that are not durable yet."""

    pool_uuid: str
    path: str
    format_version: int
    epoch: int
    lba_bytes: int
    segment_bytes: int
    segment_count: int
    segments_free: int
    segments_open: int
    segments_sealed: int
    segments_reclaiming: int
    segments_quarantined: int  # of the sealed ones: not reclaimable, a write of unknown fate
    capacity_bytes: int
    committed_chunk_count: int
    committed_payload_bytes: int
    pinned_bytes: int
    lease_count: int
    grant_count: int
    saves_stopped_reason: str  # "" while saves are accepted
    holders: tuple[HolderStatus, ...]
    counters: tuple[tuple[str, int], ...]
    exports_problem: str = ""  # why exports are not as they should be; "" while they are, or when there are none
    oldest_grant_s: float = 0.0
    oldest_lease_s: float = 0.0
    transactions_pending: int = 0


class ChunkService(Protocol):
    """The service as a client sees it: in process or over gRPC, same meaning.

    Every call blocks at most ``deadline_s`` and raises
    :class:`~meshfusion.jbof.errors.ServiceUnavailableError` past it,
    :class:`~meshfusion.jbof.errors.StaleHolderError` when holder or epoch are unknown, and
    :class:`~meshfusion.jbof.errors.ServiceError` for any other refusal.
    """

    def attach(self, request: AttachRequest, *, deadline_s: float) -> Attachment: ...
    def match(self, request: MatchRequest, *, deadline_s: float) -> MatchReply: ...
    def release(self, request: ReleaseRequest, *, deadline_s: float) -> None: ...
    def reserve(self, request: ReserveRequest, *, deadline_s: float) -> ReserveReply: ...
    def commit(self, request: CommitRequest, *, deadline_s: float) -> CommitReply: ...
    def abort(self, request: AbortRequest, *, deadline_s: float) -> None: ...
    def heartbeat(self, request: HeartbeatRequest, *, deadline_s: float) -> HeartbeatReply: ...
    def drop(self, request: DropRequest, *, deadline_s: float) -> bool: ...
    def detach(self, request: DetachRequest, *, deadline_s: float) -> None: ...
    def status(self, *, deadline_s: float) -> PoolStatus: ...
    def list_chunks(self, request: ListRequest, *, deadline_s: float) -> ListReply: ...
    def get_chunk(self, key: bytes, *, deadline_s: float) -> ChunkRecord | None: ...
    def close(self) -> None: ...
