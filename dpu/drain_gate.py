"""A chunk service that can be drained: in front of a pool, it turns away what is new once its end has been asked for.

Lookups, commits, releases, heartbeats and whatever else ends something are served to the last.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.service_types import Phase
from meshfusion.dpu.drain import Drain, Held
from meshfusion.jbof.errors import ServiceDrainingError


class DrainGate:
    """A :class:`~meshfusion.dpu.api.types.ChunkService` around ``service``, for several threads. ``held``: what is open
    in it, asked without the gate's lock. It does not close ``service``."""

    def __init__(self, service: api.ChunkService, held: Callable[[], Held], clock: Callable[[], float]) -> None:
        self._service, self._held, self._clock = service, held, clock
        self._changed = threading.Condition()
        self._drain = Drain()
        self._entered_count = 0  # calls that were let in, and whose grants may not be counted yet

    # ---- its end ---------------------------------------------------------------------------------------------------

    def begin(self, within_s: float) -> None:
        """Let nothing new in; what is open may end ``within_s`` from now."""
        with self._changed:
            self._drain.begin(self._clock(), within_s)

    def look(self) -> tuple[Phase, Held, float]:
        """The phase, what is open, and how many seconds that may last yet. Whoever owns the gate looks now and then
        while it drains."""
        with self._changed:
            # In this order: a call that ends in between is counted twice rather than not at all.
            was_refusing, entered_count = self._drain.refuses_new, self._entered_count
        held = self._held()
        held = Held(held.writes + entered_count, held.leases)
        with self._changed:
            now_s = self._clock()
            # Else a call may have been let in since it was counted: the next look tells.
            phase = self._drain.look(now_s, held) if was_refusing else self._drain.phase
            if phase.is_last:
                self._changed.notify_all()
            return phase, held, self._drain.remaining_s(now_s)

    def wait(self, seconds: float) -> None:
        """Until its end has come, and that long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._drain.phase.is_last, timeout=seconds)

    @contextlib.contextmanager
    def _entering(self, what: str) -> Iterator[None]:
        with self._changed:
            if self._drain.refuses_new:
                raise ServiceDrainingError(
                    f"{what} refused: the chunk service drains and stops within "
                    f"{self._drain.remaining_s(self._clock()):.0f} s",
                    next_step="Try again when it has been started anew; engines do so by themselves.",
                )
            self._entered_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._entered_count -= 1

    # ---- what is new -----------------------------------------------------------------------------------------------

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        with self._entering("attaching"):
            return self._service.attach(request, deadline_s=deadline_s)

    def reserve(self, request: api.ReserveRequest, *, deadline_s: float) -> api.ReserveReply:
        with self._entering("a reservation"):
            return self._service.reserve(request, deadline_s=deadline_s)

    # ---- what goes on ----------------------------------------------------------------------------------------------

    def heartbeat(self, request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        reply = self._service.heartbeat(request, deadline_s=deadline_s)
        with self._changed:
            return replace(reply, is_draining=True) if self._drain.refuses_new else reply

    def match(self, request: api.MatchRequest, *, deadline_s: float) -> api.MatchReply:
        return self._service.match(request, deadline_s=deadline_s)

    def release(self, request: api.ReleaseRequest, *, deadline_s: float) -> None:
        self._service.release(request, deadline_s=deadline_s)

    def commit(self, request: api.CommitRequest, *, deadline_s: float) -> api.CommitReply:
        return self._service.commit(request, deadline_s=deadline_s)

    def abort(self, request: api.AbortRequest, *, deadline_s: float) -> None:
        self._service.abort(request, deadline_s=deadline_s)

    def drop(self, request: api.DropRequest, *, deadline_s: float) -> bool:
        return self._service.drop(request, deadline_s=deadline_s)

    def detach(self, request: api.DetachRequest, *, deadline_s: float) -> None:
        self._service.detach(request, deadline_s=deadline_s)

    def status(self, *, deadline_s: float) -> api.PoolStatus:
        return self._service.status(deadline_s=deadline_s)

    def list_chunks(self, request: api.ListRequest, *, deadline_s: float) -> api.ListReply:
        return self._service.list_chunks(request, deadline_s=deadline_s)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> api.ChunkRecord | None:
        return self._service.get_chunk(key, deadline_s=deadline_s)

    def close(self) -> None:
        """Nothing: whoever made ``service`` closes it."""
