"""The scheduler's client of the chunk service: everything that may block happens on threads of its own.

The scheduler thread only puts commands in and takes events out. Lookups have a thread to themselves, since a commit
waits for the medium and a lookup may not (rule 8). While the service is away every lookup is answered as a miss at
once, saves are refused, and attaching is tried again in the background (rule 9).
"""

from __future__ import annotations

import functools
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
from meshfusion.host.pool_events import Attached, Committed, Event, LeasesLost, Matched, Reserved, ReserveWish
from meshfusion.jbof.errors import MeshFusionError, ServiceUnavailableError, StaleHolderError

logger = logging.getLogger("meshfusion.client")

T = TypeVar("T")

SLOW_DEADLINE_S = 10.0
ATTACH_DEADLINE_S = 10.0
CLOSE_DEADLINE_S = 2.0
REATTACH_FIRST_S = 0.2
REATTACH_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class _Standing:
    """Under which identity an attachment was made."""

    attachment: api.Attachment
    identity: bytes


class PoolClient:
    """One scheduler's standing with one service, in this process or over gRPC. ``shard``: what a chunk of ours is."""

    def __init__(
        self,
        service: api.ChunkService,
        *,
        identity: bytes,
        engine_version: str,
        chunk_tokens: int,
        shard: api.ShardSize,
    ) -> None:
        self._service = service
        self._identity = identity
        self._engine_version = engine_version
        self._chunk_tokens = chunk_tokens
        self._shard = shard
        self._change = threading.Lock()  # of identity, standing and liveness; never held while anything blocks
        self._standing: _Standing | None = None
        self._liveness: dict[str, int] = {}  # holder id -> descriptor, oldest first; kept until workers have left it
        self._lease_holders: dict[str, str] = {}  # a lease is given back by the holder that got it
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
        assert attachment is not None, "closed, or given another identity, before it was started"
        for thread in self._threads:
            thread.start()
        return attachment

    def close(self) -> None:
        """Give everything back. Callers make sure that no worker is writing any more."""
        with self._change:
            self._stop.set()
            self._lost.set()
        self._fast.put(None)
        self._slow.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_DEADLINE_S)
        with self._change:
            standing, self._standing = self._standing, None
            descriptors = list(self._liveness.values())
            self._liveness.clear()
        for descriptor in descriptors:
            os.close(descriptor)
        if standing is not None:
            self._detach(standing.attachment.holder_id)
        self._service.close()

    @property
    def attachment(self) -> api.Attachment | None:
        """The current attachment, None while the service is away."""
        standing = self._standing
        return standing.attachment if standing is not None else None

    def attach_as(self, identity: bytes) -> None:
        """Leave the current attachment and attach under another identity, in the background."""
        with self._change:
            self._identity = identity
            self._standing = None
            self._lost.set()

    def release_former_holders(self, current_holder_id: str) -> None:
        """The workers write under ``current_holder_id`` only: earlier incarnations of us may be fenced."""
        with self._change:
            holder_ids = list(self._liveness)
            if current_holder_id not in holder_ids:
                return
            former = holder_ids[: holder_ids.index(current_holder_id)]
            descriptors = [self._liveness.pop(holder_id) for holder_id in former]
        for descriptor in descriptors:
            os.close(descriptor)

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
        self._slow.put(lambda: self._abort(request))

    def drop(self, key: bytes, extent: api.Extent, reason: str) -> None:
        self._slow.put(lambda: self._drop(key, extent, reason))

    def set_leases(self, lease_ids: tuple[str, ...]) -> None:
        """The leases to keep alive; the answer to a heartbeat may be :class:`LeasesLost`."""
        self._lease_ids = lease_ids

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
            if standing is not None:
                self._lost.wait(standing.attachment.heartbeat_s)
                if self._standing is standing and not self._stop.is_set():
                    self._heartbeat(standing.attachment)
                continue
            if self._stop.wait(retry_s):
                return
            retry_s = min(REATTACH_MAX_S, retry_s * 2)
            if self._try("attach", "", self._attach) is not None:
                logger.warning("attached to the chunk service again")
                retry_s = REATTACH_FIRST_S

    def _attach(self) -> api.Attachment | None:
        """As a new incarnation each time: an earlier one may have writes of unknown fate and is never readmitted.

        None when the identity changed or the client was closed meanwhile.
        """
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
        try:
            descriptor = hold_liveness(Path(attachment.liveness_path))
        except MeshFusionError:
            self._detach(attachment.holder_id)
            raise
        with self._change:
            if identity == self._identity and not self._stop.is_set():
                # Earlier incarnations may be fenced now: a worker that still writes as one holds its lock itself, and
                # an idle engine must not keep the service from reclaiming until somebody asks it something.
                for former in self._liveness.values():
                    os.close(former)
                self._liveness = {attachment.holder_id: descriptor}
                self._standing = _Standing(attachment, identity)
                self._lost.clear()
                self._events.put(Attached(attachment))
                return attachment
        os.close(descriptor)
        self._detach(attachment.holder_id)  # nobody has used it
        return None

    def _detach(self, holder_id: str) -> None:
        request = api.DetachRequest(holder_id)
        try:
            self._service.detach(request, deadline_s=2.0)
        except Exception as error:
            logger.info("detaching failed, the service will fence %s by itself: %s", holder_id, error)

    def _heartbeat(self, attachment: api.Attachment) -> None:
        holder_id = attachment.holder_id
        request = api.HeartbeatRequest(holder_id, attachment.epoch, self._lease_ids)
        reply = self._try("heartbeat", holder_id, lambda: self._service.heartbeat(request, deadline_s=2.0))
        if reply is not None and reply.lost_lease_ids:
            for lease_id in reply.lost_lease_ids:
                self._lease_holders.pop(lease_id, None)
            self._events.put(LeasesLost(reply.lost_lease_ids))

    # ---- commands, on the threads --------------------------------------------------------------------------------

    def _match(
        self, request_id: str, attempt: int, keys_of: Callable[[], tuple[bytes, ...] | None], deadline_s: float
    ) -> None:
        """Every lookup is answered, whatever happens: somebody waits for it."""
        answer = None
        try:
            standing = self._standing
            keys = keys_of() if standing is not None and time.monotonic() < deadline_s else None
            if standing is not None and keys:
                answer = self._ask_stored(standing, request_id, attempt, keys, deadline_s)
        except Exception:
            logger.exception("a lookup failed")
        self._events.put(answer or Matched(request_id, attempt, "", ()))

    def _ask_stored(
        self, standing: _Standing, request_id: str, attempt: int, keys: tuple[bytes, ...], deadline_s: float
    ) -> Matched | None:
        holder_id = standing.attachment.holder_id
        request = api.MatchRequest(holder_id, request_id, 0, self._chunk_tokens, keys)
        # A little more than the scheduler waits: a late answer carries a lease that must be given back.
        patience_s = max(0.0, deadline_s - time.monotonic()) + 0.25
        reply = self._try("match", holder_id, lambda: self._service.match(request, deadline_s=patience_s))
        if reply is None:
            return None
        if reply.lease_id:
            self._lease_holders[reply.lease_id] = holder_id
        return Matched(request_id, attempt, reply.lease_id, self._believable(reply.chunks, keys, standing.identity))

    def _believable(
        self, chunks: tuple[api.ChunkRecord, ...], keys: tuple[bytes, ...], identity: bytes
    ) -> tuple[api.ChunkRecord, ...]:
        """Rule 5, on our side too: key, identity and position of every chunk are what we asked for."""
        if len(chunks) > len(keys):
            logger.error("the service offered %d chunks, %d were asked for", len(chunks), len(keys))
        for i, chunk in enumerate(chunks[: len(keys)]):
            right = (
                chunk.key == keys[i]
                and chunk.identity == identity
                and chunk.position_tokens == i * self._chunk_tokens
                and chunk.token_count == self._chunk_tokens
                and [_size_of(shard) for shard in chunk.shards] == [self._shard]
            )
            if not right:
                logger.error("the service offered a chunk that was not asked for: %s", chunk.key.hex())
                return chunks[:i]
        return chunks[: len(keys)]

    def _release(self, lease_ids: tuple[str, ...]) -> None:
        by_holder: dict[str, list[str]] = {}
        for lease_id in lease_ids:
            holder_id = self._lease_holders.pop(lease_id, None)
            if holder_id is not None:  # else it went with its attachment
                by_holder.setdefault(holder_id, []).append(lease_id)
        for holder_id, held in by_holder.items():
            request = api.ReleaseRequest(holder_id, tuple(held))
            self._try("release", holder_id, functools.partial(self._service.release, request, deadline_s=2.0))

    def _reserve(self, wishes: tuple[ReserveWish, ...]) -> None:
        """Every wish is answered, whatever happens: its blocks are pinned until then."""
        standing = self._standing
        answer = None
        possible: list[tuple[ReserveWish, bytes]] = []
        try:
            if standing is not None:
                possible = _with_keys(wishes, standing.identity)
                answer = self._ask_places(standing, possible) if possible else None
        except Exception:
            logger.exception("reserving failed")
        asked = {wish.save_id for wish, _ in possible} if answer is not None else set()
        refused = tuple(wish.save_id for wish in wishes if wish.save_id not in asked)
        if answer is not None:
            self._events.put(answer)
        if refused:
            self._events.put(Reserved(refused, (), None, "", 0, b""))

    def _ask_places(self, standing: _Standing, possible: list[tuple[ReserveWish, bytes]]) -> Reserved | None:
        items = tuple(
            api.ReserveItem(key, 0, wish.position_tokens, wish.token_count, (wish.shard,)) for wish, key in possible
        )
        holder_id, epoch = standing.attachment.holder_id, standing.attachment.epoch
        request = api.ReserveRequest(holder_id, epoch, items)
        reply = self._try("reserve", holder_id, lambda: self._service.reserve(request, deadline_s=SLOW_DEADLINE_S))
        if reply is None:
            return None
        granted = [result for result in reply.results if result.outcome is api.ReserveOutcome.GRANTED]
        if len(reply.results) != len(items) or any(len(result.extents) != 1 for result in granted):
            logger.error("the service answered a reservation of %d chunks with something else", len(items))
            self._abort(api.AbortRequest(holder_id, epoch, tuple(result.grant_id for result in granted)))
            return None
        save_ids = tuple(wish.save_id for wish, _ in possible)
        keys = tuple(key for _, key in possible)
        return Reserved(save_ids, keys, reply.results, holder_id, epoch, standing.identity)

    def _commit(self, holder_id: str, epoch: int, items: tuple[api.CommitItem, ...]) -> None:
        request = api.CommitRequest(holder_id, epoch, items)
        reply = self._try("commit", holder_id, lambda: self._service.commit(request, deadline_s=SLOW_DEADLINE_S))
        committed = sum(reply.committed) if reply is not None else 0
        self._events.put(Committed(committed, len(items) - committed))

    def _abort(self, request: api.AbortRequest) -> None:
        self._try("abort", request.holder_id, lambda: self._service.abort(request, deadline_s=SLOW_DEADLINE_S))

    def _drop(self, key: bytes, extent: api.Extent, reason: str) -> None:
        attachment = self.attachment
        if attachment is not None:
            request = api.DropRequest(attachment.holder_id, key, extent, reason)
            self._try("drop", attachment.holder_id, lambda: self._service.drop(request, deadline_s=SLOW_DEADLINE_S))

    def _try(self, what: str, holder_id: str, call: Callable[[], T]) -> T | None:
        """The answer, or None after trouble; losing the service or our place in it starts a new attachment.

        ``holder_id``: as whom; trouble of an earlier incarnation says nothing about the current one.
        """
        try:
            return call()
        except StaleHolderError as error:
            self._lose_attachment(what, holder_id, error)
        except ServiceUnavailableError as error:
            # A lookup that was merely slow is no reason to let go; a heartbeat that fails is.
            if what != "match":
                self._lose_attachment(what, holder_id, error)
            else:
                logger.info("lookup failed: %s", error.message)
        except MeshFusionError as error:
            logger.warning("%s refused by the chunk service: %s", what, error)
        except Exception:  # a bug in the service, when it lives in this process, must not end our threads
            logger.exception("%s failed", what)
        return None

    def _lose_attachment(self, what: str, holder_id: str, error: MeshFusionError) -> None:
        with self._change:
            standing = self._standing
            is_current = standing is not None and standing.attachment.holder_id == holder_id
            if is_current:
                self._standing = None
                self._lease_holders = {}  # void with the attachment
                self._lost.set()
        if is_current:
            logger.warning("lost the chunk service during %s: %s", what, error.message)
        else:
            logger.info("%s failed: %s", what, error.message)


def _with_keys(wishes: tuple[ReserveWish, ...], identity: bytes) -> list[tuple[ReserveWish, bytes]]:
    """The wishes that can be asked for under ``identity``, each with its key."""
    keyed = [(wish, wish.key_of()) for wish in wishes if wish.identity == identity]
    return [(wish, key) for wish, key in keyed if key is not None]


def _size_of(shard: api.Shard) -> api.ShardSize:
    return api.ShardSize(shard.rank, shard.unit_bytes, len(shard.unit_digests))
