"""The scheduler's client of the chunk service: everything that may block happens on threads of its own.

The scheduler thread only puts commands in and takes events out. Lookups have a thread to themselves, since a commit
waits for the medium and a lookup may not (rule 8). While the service is away every lookup is answered as a miss at
once, saves are refused, and attaching is tried again in the background (rule 9).
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.limits import MAX_ITEMS
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.api.tracing import NO_HEADERS, Headers, within_trace
from meshfusion.host.command_queue import CommandQueue
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.pool_events import (
    NOTHING_STORED,
    AttachmentLost,
    Committed,
    Dropped,
    Event,
    GrantedRun,
    LeasesLost,
    Matched,
    RankDigests,
    ReserveFailed,
    ReserveWish,
)
from meshfusion.host.pool_replies import (
    granted_results,
    is_reserve_reply_sound,
    reserve_items,
    reserved,
    stored_boundary,
)
from meshfusion.host.pool_standing import PoolStanding, Standing

logger = logging.getLogger("meshfusion.client")

Asked = tuple[api.GroupKeys, ...]

SLOW_DEADLINE_S = 10.0
CLOSE_DEADLINE_S = 2.0
# More than an engine has requests; a lookup that waits behind so many is a miss by its deadline.
MAX_FAST_COMMANDS = 4096
# Each may wait for SLOW_DEADLINE_S, and holds the digests of a run. What was reserved has to be settled: nothing new is
# begun any more long before there is no room to end it.
MAX_SLOW_COMMANDS = 4096
MAX_BEFORE_RESERVE = 256


class PoolClient:
    """One scheduler's client of one service, in this process or over gRPC. ``form``: what a chunk of ours is.
    ``now_s`` reads the clock."""

    def __init__(
        self,
        service: api.ChunkService,
        *,
        identity: bytes,
        engine_version: str,
        form: ChunkForm,
        access: api.Access = api.Access.LOCAL,
        tenant: str = DEFAULT_TENANT,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._now_s = now_s
        self._form = form
        self._lease_holders: dict[str, str] = {}  # a lease is given back by the holder that got it
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._fast = CommandQueue("lookups and releases", most=MAX_FAST_COMMANDS)
        self._slow = CommandQueue("reservations, commits and drops", most=MAX_SLOW_COMMANDS)
        self._standing = PoolStanding(
            service,
            identity=identity,
            engine_version=engine_version,
            rank_count=form.rank_count,
            access=access,
            tenant=tenant,
            tell=self._told,
        )
        self._threads = [
            threading.Thread(target=self._run, args=(self._fast,), name="meshfusion-lookup", daemon=True),
            threading.Thread(target=self._run, args=(self._slow,), name="meshfusion-reserve", daemon=True),
        ]

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self) -> api.Attachment:
        """Attach for the first time, on the caller's thread: trouble here is the engine's to hear about."""
        attachment = self._standing.start()
        for thread in self._threads:
            thread.start()
        return attachment

    def close(self) -> None:
        """Give everything back. Callers make sure that no worker is writing any more."""
        self._standing.stop()
        self._fast.close()
        self._slow.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_DEADLINE_S)
        self._standing.leave(patience_s=CLOSE_DEADLINE_S)
        self._service.close()

    @property
    def attachment(self) -> api.Attachment | None:
        """The current attachment, None while the service is away."""
        standing = self._standing.current
        return standing.attachment if standing is not None else None

    def attach_as(self, identity: bytes) -> None:
        """Leave the current attachment and attach under another identity, in the background."""
        self._standing.attach_as(identity)

    def attach_anew(self, holder_id: str) -> None:
        """Go on as a new incarnation of the same identity, in the background: this one has writes in doubt, and what
        they withhold is free again only when it is fenced. Nothing happens when it is not the current one any more."""
        self._standing.attach_anew(holder_id)

    # ---- commands ------------------------------------------------------------------------------------------------

    def match(
        self,
        request_id: str,
        attempt: int,
        keys_of: Callable[[], Asked | None],
        deadline_s: float,
        trace: Headers = NO_HEADERS,
    ) -> None:
        """Ask; the answer comes as :class:`Matched`. ``keys_of`` runs on the client's thread; None is a miss.

        ``trace``, here and below: what the call to the service belongs to.
        """

        def ask() -> None:
            with within_trace(trace):
                self._match(request_id, attempt, keys_of, deadline_s)

        if not self._fast.offer(ask):
            self._events.put(Matched(request_id, attempt, "", NOTHING_STORED))

    def release(self, lease_ids: tuple[str, ...]) -> None:
        """Those for which there is no room among the commands lapse by themselves, when nobody renews them any more."""
        self._fast.offer(lambda: self._release(lease_ids))

    def reserve(self, wishes: tuple[ReserveWish, ...]) -> None:
        """Ask for places; each is answered, as :class:`Reserved` or :class:`ReserveFailed`."""
        if not self._slow.offer(lambda: self._reserve(wishes), behind=MAX_BEFORE_RESERVE):
            for wish in wishes:
                self._events.put(ReserveFailed(wish.run_id))

    def settle(
        self,
        granted: GrantedRun,
        unit_digests: Sequence[RankDigests],
        *,
        withheld: Collection[int] = (),
        in_doubt: Collection[int] = (),
        trace: Headers = NO_HEADERS,
    ) -> None:
        """Make written chunks visible, the answer comes as :class:`Committed`; give back the places of the others.

        ``unit_digests``: of each rank, for each granted chunk those of the units that it wrote. Of the granted chunks
        (from 0), ``withheld`` are not to become visible; and the places of those of them that are ``in_doubt``, since a
        write may still land there, are not given back. Where there is no room among the commands, nothing becomes
        visible, and the grants expire at the service, as those of one that is gone.
        """

        def settle() -> None:
            with within_trace(trace):
                self._settle(granted, unit_digests, withheld, in_doubt)

        if not self._slow.offer(settle) and (shown := _shown(granted, withheld)):
            self._events.put(_committed(None, [granted.keys[i] for i in shown]))

    def drop(self, key: bytes, extent: api.Extent, reason: str) -> None:
        """Have the service forget this chunk, unless it has been written anew since; comes back as :class:`Dropped`,
        also where there is no room among the commands: whoever loads it next finds out, too."""
        self._events.put(Dropped(key))
        self._slow.offer(lambda: self._drop(key, extent, reason), behind=MAX_BEFORE_RESERVE)

    def set_leases(self, lease_ids: tuple[str, ...]) -> None:
        """The leases to keep alive; the answer to a heartbeat may be :class:`LeasesLost`."""
        self._standing.set_leases(lease_ids)

    def set_reached(self, holder_id: str, reached: api.Reached) -> None:
        """What all workers reach as this incarnation; the service hears of it with the next heartbeat."""
        self._standing.set_reached(holder_id, reached)

    def take_events(self) -> list[Event]:
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    # ---- on the threads ------------------------------------------------------------------------------------------

    def _run(self, commands: CommandQueue) -> None:
        while (command := commands.take()) is not None:
            try:
                command()
            except Exception:  # one bad command must not end the thread that answers the others
                logger.exception("a command to the chunk service failed")

    def _told(self, event: Event | AttachmentLost) -> None:
        match event:
            case AttachmentLost():
                self._lease_holders = {}  # void with the attachment
                return
            case LeasesLost(lease_ids):
                for lease_id in lease_ids:
                    self._lease_holders.pop(lease_id, None)
        self._events.put(event)

    def _match(self, request_id: str, attempt: int, keys_of: Callable[[], Asked | None], deadline_s: float) -> None:
        """Every lookup is answered, whatever happens: somebody waits for it."""
        answer = None
        try:
            standing = self._standing.asking
            asked = keys_of() if standing is not None and self._now_s() < deadline_s else None
            if standing is not None and asked and asked[0].keys:
                answer = self._ask_stored(standing, request_id, attempt, asked, deadline_s)
        except Exception:
            logger.exception("a lookup failed")
        self._events.put(answer or Matched(request_id, attempt, "", NOTHING_STORED))

    def _ask_stored(
        self, standing: Standing, request_id: str, attempt: int, asked: Asked, deadline_s: float
    ) -> Matched | None:
        holder_id = standing.attachment.holder_id
        request = api.MatchRequest(holder_id, request_id, self._form.chunk_tokens, asked)
        # A little more than the scheduler waits: a late answer carries a lease that must be given back.
        patience_s = max(0.0, deadline_s - self._now_s()) + 0.25
        reply = self._standing.ask("match", holder_id, lambda: self._service.match(request, deadline_s=patience_s))
        if reply is None:
            return None
        if reply.lease_id:
            self._lease_holders[reply.lease_id] = holder_id
        stored = stored_boundary(reply, asked, standing.identity, self._form)
        return Matched(request_id, attempt, reply.lease_id, stored)

    def _release(self, lease_ids: tuple[str, ...]) -> None:
        """By the holder that got them, which may be an earlier one of ours: leases of a lost one are void."""
        by_holder: dict[str, list[str]] = {}
        for lease_id in lease_ids:
            holder_id = self._lease_holders.pop(lease_id, None)
            if holder_id is not None:
                by_holder.setdefault(holder_id, []).append(lease_id)
        for holder_id, held in by_holder.items():
            request = api.ReleaseRequest(holder_id, tuple(held))
            self._standing.ask("release", holder_id, functools.partial(self._service.release, request, deadline_s=2.0))

    def _reserve(self, wishes: tuple[ReserveWish, ...]) -> None:
        """Every wish is answered, whatever happens: its blocks are pinned until then."""
        standing = self._standing.asking
        for batch in _batches(wishes, MAX_ITEMS):
            answers: dict[int, Event] = {wish.run_id: ReserveFailed(wish.run_id) for wish in batch}
            try:
                if standing is not None:
                    possible = _with_keys(batch, standing.identity)
                    answers |= self._ask_places(standing, possible) if possible else {}
            except Exception:
                logger.exception("reserving failed")
            for answer in answers.values():
                self._events.put(answer)

    def _ask_places(
        self, standing: Standing, possible: list[tuple[ReserveWish, tuple[bytes, ...]]]
    ) -> dict[int, Event]:
        items = tuple(item for wish, keys in possible for item in reserve_items(wish, keys, self._form))
        holder_id, epoch = standing.attachment.holder_id, standing.attachment.epoch
        request = api.ReserveRequest(holder_id, epoch, items)
        traces = {wish.trace for wish, _ in possible}
        with within_trace(traces.pop() if len(traces) == 1 else NO_HEADERS):  # of several, none stands for the call
            reply = self._standing.ask(
                "reserve", holder_id, lambda: self._service.reserve(request, deadline_s=SLOW_DEADLINE_S)
            )
        if reply is None:
            return {}
        if not is_reserve_reply_sound(reply, items):
            logger.error("the service answered a reservation of %d chunks with something else", len(items))
            grant_ids = tuple(result.grant_id for result in granted_results(reply))
            self._abort(api.AbortRequest(holder_id, epoch, grant_ids))
            return {}
        answers: dict[int, Event] = {}
        spare: list[str] = []
        results = iter(reply.results)
        for wish, keys in possible:
            run = reserved(wish, keys, [next(results) for _ in keys], holder_id, epoch, self._form)
            answers[wish.run_id] = run.answer
            spare += run.spare_grant_ids
        if spare:
            self._abort(api.AbortRequest(holder_id, epoch, tuple(spare)))
        return answers

    def _settle(
        self,
        granted: GrantedRun,
        unit_digests: Sequence[RankDigests],
        withheld: Collection[int],
        in_doubt: Collection[int],
    ) -> None:
        assert set(in_doubt) <= set(withheld), "visible and in doubt"
        shown = _shown(granted, withheld)
        items = tuple(
            api.CommitItem(granted.grant_ids[i], _shard_digests([rank[i] for rank in unit_digests]), granted.bundles[i])
            for i in shown
        )
        unwritten = tuple(granted.grant_ids[i] for i in withheld if i not in in_doubt)
        doubtful = tuple(granted.grant_ids[i] for i in in_doubt)
        holder_id, epoch = granted.holder_id, granted.epoch
        if unwritten or doubtful:
            self._abort(api.AbortRequest(holder_id, epoch, unwritten, doubtful))
        if items:
            request = api.CommitRequest(holder_id, epoch, items)
            reply = self._standing.ask(
                "commit", holder_id, lambda: self._service.commit(request, deadline_s=SLOW_DEADLINE_S)
            )
            self._events.put(_committed(reply, [granted.keys[i] for i in shown]))

    def _abort(self, request: api.AbortRequest) -> None:
        self._standing.ask("abort", request.holder_id, lambda: self._service.abort(request, deadline_s=SLOW_DEADLINE_S))

    def _drop(self, key: bytes, extent: api.Extent, reason: str) -> None:
        attachment = self.attachment
        if attachment is not None:
            request = api.DropRequest(attachment.holder_id, key, extent, reason)
            self._standing.ask(
                "drop", attachment.holder_id, lambda: self._service.drop(request, deadline_s=SLOW_DEADLINE_S)
            )


def _shown(granted: GrantedRun, withheld: Collection[int]) -> list[int]:
    """Of the granted chunks, those that are to become visible."""
    return [i for i in range(len(granted.grant_ids)) if i not in withheld]


def _committed(reply: api.CommitReply | None, keys: Sequence[bytes]) -> Committed:
    """Of ``keys``, those that the reply says are visible; with none, or one to another question, that is not known."""
    told = reply.committed if reply is not None else ()
    if len(told) != len(keys):
        return Committed((), tuple(keys))
    answers = list(zip(keys, told, strict=True))
    return Committed(tuple(key for key, yes in answers if yes), tuple(key for key, yes in answers if not yes))


def _shard_digests(by_rank: Sequence[tuple[bytes, ...] | None]) -> tuple[tuple[bytes, ...], ...]:
    """Of a chunk: those of the ranks that wrote something of it, which are in the order of its shards."""
    assert None not in by_rank, "visible without all shards (rule 1)"
    return tuple(digests for digests in by_rank if digests)


def _with_keys(wishes: Sequence[ReserveWish], identity: bytes) -> list[tuple[ReserveWish, tuple[bytes, ...]]]:
    """The wishes that can be asked for under ``identity``, each with its keys."""
    keyed = []
    for wish in wishes:
        keys = _keys_of(wish) if wish.identity == identity else None
        if keys is not None:
            keyed.append((wish, keys))
    return keyed


def _keys_of(wish: ReserveWish) -> tuple[bytes, ...] | None:
    """A bug in making the keys of one run must not cost the others their places."""
    try:
        return wish.keys_of()
    except Exception:
        logger.exception("the keys of a run could not be made")
        return None


def _batches(wishes: Sequence[ReserveWish], chunks_max: int) -> Iterator[list[ReserveWish]]:
    """Wishes of at most ``chunks_max`` chunks together (a single one may have more and is then refused)."""
    batch: list[ReserveWish] = []
    for wish in wishes:
        if batch and sum(other.chunk_count for other in batch) + wish.chunk_count > chunks_max:
            yield batch
            batch = []
        batch.append(wish)
    if batch:
        yield batch
