"""The scheduler's client of the chunk service: everything that may block happens on two threads of its own.

The scheduler thread only puts commands in and takes events out. Lookups have a thread to themselves, since a commit
waits for the medium and a lookup may not (rule 8). While the service is away every lookup is answered as a miss at
once, saves are refused, and attaching is tried again in the background (rule 9).
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.jbof.errors import MeshFusionError, ServiceUnavailableError, StaleHolderError

logger = logging.getLogger("meshfusion.client")

T = TypeVar("T")

SLOW_DEADLINE_S = 10.0
ATTACH_DEADLINE_S = 10.0
REATTACH_FIRST_S = 0.2
REATTACH_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class Matched:
    """Answer to :meth:`PoolClient.match`; no lease and no chunks for a miss, whatever the reason."""

    request_id: str
    attempt: int
    lease_id: str
    chunks: tuple[api.ChunkRecord, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to :meth:`PoolClient.reserve`. ``results`` is None when the service could not be asked."""

    save_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    results: tuple[api.ReserveResult, ...] | None
    holder_id: str
    epoch: int
    identity: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    committed_count: int
    refused_count: int


@dataclass(frozen=True, slots=True)
class LeasesLost:
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attached:
    """A new attachment: workers must switch to it before anything is saved. ``liveness_descriptor`` is ours."""

    attachment: api.Attachment


Event = Matched | Reserved | Committed | LeasesLost | Attached


@dataclass(frozen=True, slots=True)
class _Standing:
    """Under which identity an attachment was made."""

    attachment: api.Attachment
    identity: bytes


@dataclass(frozen=True, slots=True)
class ReserveWish:
    """A chunk to reserve; its key is made from ``key_of`` on the client's thread, not on the scheduler's."""

    save_id: int
    key_of: Callable[[], bytes | None]
    position_tokens: int
    token_count: int
    shard: api.ShardSize


class PoolClient:
    """One scheduler's standing with one service. ``service``: in this process or over gRPC."""

    def __init__(
        self,
        service: api.ChunkService,
        *,
        identity: bytes,
        engine_version: str,
        chunk_tokens: int,
        lookup_deadline_s: float,
    ) -> None:
        self._service = service
        self._identity = identity
        self._engine_version = engine_version
        self._chunk_tokens = chunk_tokens
        self._lookup_deadline_s = lookup_deadline_s
        self._standing: _Standing | None = None
        self._liveness: dict[str, int] = {}  # holder id -> descriptor; released when workers have left it
        self._lease_ids: tuple[str, ...] = ()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._fast: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(self._fast,), name="meshfusion-lookup", daemon=True),
            threading.Thread(target=self._run, args=(self._slow,), name="meshfusion-reserve", daemon=True),
            threading.Thread(target=self._keep_attached, name="meshfusion-attach", daemon=True),
        ]

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self) -> api.Attachment:
        """Attach for the first time, on the caller's thread: trouble here is the engine's to hear about."""
        attachment = self._attach()
        for thread in self._threads:
            thread.start()
        return attachment

    def close(self) -> None:
        """Give everything back. Callers make sure that no worker is writing any more."""
        self._stop.set()
        self._lost.set()
        self._fast.put(None)
        self._slow.put(None)
        for thread in self._threads:
            thread.join(2.0)
        for descriptor in self._liveness.values():
            os.close(descriptor)
        self._liveness.clear()
        attachment = self.attachment
        if attachment is not None:
            try:
                self._service.detach(api.DetachRequest(attachment.holder_id), deadline_s=2.0)
            except MeshFusionError as error:
                logger.info("detaching failed, the service will fence this engine by itself: %s", error.message)
        self._service.close()

    @property
    def attachment(self) -> api.Attachment | None:
        """The current attachment, None while the service is away."""
        standing = self._standing
        return standing.attachment if standing is not None else None

    def attach_as(self, identity: bytes) -> None:
        """Leave the current attachment and attach under another identity, in the background."""
        self._identity = identity
        self._standing = None
        self._lost.set()

    def release_former_holders(self, current_holder_id: str) -> None:
        """The workers write under ``current_holder_id`` only: earlier incarnations of us may be fenced."""
        for holder_id in [h for h in self._liveness if h != current_holder_id]:
            os.close(self._liveness.pop(holder_id))

    # ---- commands ------------------------------------------------------------------------------------------------

    def match(
        self, request_id: str, attempt: int, keys_of: Callable[[], tuple[bytes, ...] | None], deadline_s: float
    ) -> None:
        """Ask; the answer comes as :class:`Matched`. ``keys_of`` runs on the client's thread; None is a miss."""
        self._fast.put(lambda: self._match(request_id, attempt, keys_of, deadline_s))

    def release(self, lease_ids: tuple[str, ...]) -> None:
        self._fast.put(lambda: self._release(lease_ids))

    def reserve(self, wishes: tuple[ReserveWish, ...]) -> None:
        """Ask for places; the answer comes as :class:`Reserved`, for all of them."""
        self._slow.put(lambda: self._reserve(wishes))

    def commit(self, holder_id: str, epoch: int, items: tuple[api.CommitItem, ...]) -> None:
        """Make written chunks visible; the answer comes as :class:`Committed`."""
        self._slow.put(lambda: self._commit(holder_id, epoch, items))

    def abort(self, holder_id: str, epoch: int, grant_ids: tuple[str, ...]) -> None:
        request = api.AbortRequest(holder_id, epoch, grant_ids)
        self._slow.put(lambda: self._try("abort", lambda: self._service.abort(request, deadline_s=SLOW_DEADLINE_S)))

    def drop(self, key: bytes, extent: api.Extent, reason: str) -> None:
        self._slow.put(lambda: self._drop(key, extent, reason))

    def set_leases(self, lease_ids: tuple[str, ...]) -> None:
        """The leases to keep alive; the answer to a heartbeat may be :class:`LeasesLost`."""
        self._lease_ids = lease_ids

    def in_background(self, work: Callable[[], None]) -> None:
        """Run something slow that the commands depend on (an adapter's digest) off the scheduler's thread."""
        self._slow.put(work)

    def take_events(self) -> list[Event]:
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    # ---- threads -------------------------------------------------------------------------------------------------

    def _run(self, commands: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (command := commands.get()) is not None:
            try:
                command()
            except Exception:  # one bad command must not end the thread that answers the others
                logger.exception("a command to the chunk service failed")

    def _keep_attached(self) -> None:
        """Heartbeats while attached; attaching again, with patience, when not."""
        retry_s = REATTACH_FIRST_S
        while not self._stop.is_set():
            standing = self._standing
            if standing is None:
                if self._stop.wait(retry_s):
                    return
                retry_s = min(REATTACH_MAX_S, retry_s * 2)
                if self._try("attach", self._attach) is not None:
                    logger.warning("attached to the chunk service again")
                    retry_s = REATTACH_FIRST_S
                continue
            self._lost.wait(standing.attachment.heartbeat_s)
            if self._standing is standing and not self._stop.is_set():
                self._heartbeat(standing.attachment)

    def _attach(self) -> api.Attachment:
        """As a new incarnation each time: an earlier one may have writes of unknown fate and is never readmitted."""
        self._lost.clear()
        identity = self._identity
        request = api.AttachRequest(
            incarnation=uuid.uuid4().hex,
            engine_kind="vllm",
            engine_version=self._engine_version,
            host=socket.gethostname(),
            pid=os.getpid(),
            identity=identity,
            rank_count=1,
        )
        attachment = self._service.attach(request, deadline_s=ATTACH_DEADLINE_S)
        self._liveness[attachment.holder_id] = hold_liveness(Path(attachment.liveness_path))
        if identity != self._identity:  # changed meanwhile: this attachment is of no use
            self._lost.set()
            return attachment
        self._standing = _Standing(attachment, identity)
        self._events.put(Attached(attachment))
        return attachment

    def _heartbeat(self, attachment: api.Attachment) -> None:
        request = api.HeartbeatRequest(attachment.holder_id, attachment.epoch, self._lease_ids)
        reply = self._try("heartbeat", lambda: self._service.heartbeat(request, deadline_s=2.0))
        if reply is not None and reply.lost_lease_ids:
            self._events.put(LeasesLost(reply.lost_lease_ids))

    # ---- commands, on the threads --------------------------------------------------------------------------------

    def _match(
        self, request_id: str, attempt: int, keys_of: Callable[[], tuple[bytes, ...] | None], deadline_s: float
    ) -> None:
        standing = self._standing
        left_s = deadline_s - time.monotonic()
        keys = keys_of() if standing is not None and left_s > 0 else None
        reply = None
        if standing is not None and keys:
            request = api.MatchRequest(standing.attachment.holder_id, request_id, 0, self._chunk_tokens, keys)
            # A little more than the scheduler waits: a late answer carries a lease that must be given back.
            reply = self._try("match", lambda: self._service.match(request, deadline_s=left_s + 0.25))
        chunks = self._believable(reply.chunks, keys, standing.identity) if reply and keys and standing else ()
        self._events.put(Matched(request_id, attempt, reply.lease_id if reply else "", chunks))

    def _believable(
        self, chunks: tuple[api.ChunkRecord, ...], keys: tuple[bytes, ...], identity: bytes
    ) -> tuple[api.ChunkRecord, ...]:
        """Rule 5, on our side too: key, identity and position of every chunk are what we asked for."""
        for i, chunk in enumerate(chunks):
            right = (
                chunk.key == keys[i]
                and chunk.identity == identity
                and chunk.position_tokens == i * self._chunk_tokens
                and chunk.token_count == self._chunk_tokens
                and len(chunk.shards) == 1
            )
            if not right:
                logger.error("the service offered a chunk that was not asked for: %s", chunk.key.hex())
                return chunks[:i]
        return chunks

    def _release(self, lease_ids: tuple[str, ...]) -> None:
        attachment = self.attachment
        if attachment is not None:
            request = api.ReleaseRequest(attachment.holder_id, lease_ids)
            self._try("release", lambda: self._service.release(request, deadline_s=2.0))

    def _reserve(self, wishes: tuple[ReserveWish, ...]) -> None:
        standing = self._standing
        save_ids = tuple(wish.save_id for wish in wishes)
        keys = [wish.key_of() for wish in wishes] if standing is not None else []
        if standing is None or any(key is None for key in keys):
            self._events.put(Reserved(save_ids, (), None, "", 0, b""))
            return
        known_keys = tuple(key for key in keys if key is not None)
        items = tuple(
            api.ReserveItem(key, 0, wish.position_tokens, wish.token_count, (wish.shard,))
            for key, wish in zip(known_keys, wishes, strict=True)
        )
        attachment = standing.attachment
        request = api.ReserveRequest(attachment.holder_id, attachment.epoch, items)
        reply = self._try("reserve", lambda: self._service.reserve(request, deadline_s=SLOW_DEADLINE_S))
        results = reply.results if reply is not None else None
        self._events.put(
            Reserved(save_ids, known_keys, results, attachment.holder_id, attachment.epoch, standing.identity)
        )

    def _commit(self, holder_id: str, epoch: int, items: tuple[api.CommitItem, ...]) -> None:
        request = api.CommitRequest(holder_id, epoch, items)
        reply = self._try("commit", lambda: self._service.commit(request, deadline_s=SLOW_DEADLINE_S))
        committed = sum(reply.committed) if reply is not None else 0
        self._events.put(Committed(committed, len(items) - committed))

    def _drop(self, key: bytes, extent: api.Extent, reason: str) -> None:
        attachment = self.attachment
        if attachment is not None:
            request = api.DropRequest(attachment.holder_id, key, extent, reason)
            self._try("drop", lambda: self._service.drop(request, deadline_s=SLOW_DEADLINE_S))

    def _try(self, what: str, call: Callable[[], T]) -> T | None:
        """The answer, or None after trouble; losing the service or our place in it starts a new attachment."""
        try:
            return call()
        except StaleHolderError as error:
            self._lose_attachment(what, error)
        except ServiceUnavailableError as error:
            # A lookup that was merely slow is no reason to let go; a heartbeat that fails is.
            if what != "match":
                self._lose_attachment(what, error)
            else:
                logger.info("lookup failed: %s", error.message)
        except MeshFusionError as error:
            logger.warning("%s refused by the chunk service: %s", what, error)
        return None

    def _lose_attachment(self, what: str, error: MeshFusionError) -> None:
        if self._standing is not None:
            logger.warning("lost the chunk service during %s: %s", what, error.message)
        self._standing = None
        self._lost.set()
