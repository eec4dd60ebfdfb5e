"""The pool client with its threads taken out: commands wait in its queues until the simulation runs one.

All else is the real client, so that what it makes of the service's answers and of lost attachments is driven, too. It
is watched from both sides: each lease is given back once, and answers to the scheduler are what leases stand for.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.tracing import NO_HEADERS, Headers
from meshfusion.host.command_queue import CommandQueue
from meshfusion.host.pool_client import MAX_FAST_COMMANDS, MAX_SLOW_COMMANDS, Asked, PoolClient
from meshfusion.host.pool_events import Event, LeasesLost, Matched, ReserveWish
from meshfusion.host.pool_standing import PoolStanding, Standing
from tests.sim.connector.blocks import must
from tests.sim.connector.requests import Request, Status
from tests.sim.connector.service import Asking, SimService
from tests.sim.connector.shapes import Shape


class SimStanding(PoolStanding):
    """Attaches and beats when it is told to."""

    def __init__(self, service: Any, identity: bytes, rank_count: int, tell: Callable[[Any], None]) -> None:
        super().__init__(
            service,
            identity=identity,
            engine_version="0.32.0",
            rank_count=rank_count,
            access=api.Access.LOCAL,
            tell=tell,
        )

    def attach(self) -> None:
        if self._current is None:
            self.ask("attach", "", self._attach)

    def beat(self) -> None:
        if self._current is not None:
            self._heartbeat(self._current.attachment)


class SimClient(PoolClient):
    def __init__(
        self, service: SimService, identity: bytes, shape: Shape, requests: dict[str, Request], now_s: Any
    ) -> None:
        self._service: Any = service
        self._now_s = now_s
        self._form = shape.form
        self._lease_holders: dict[str, str] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._fast = CommandQueue("lookups and releases", most=MAX_FAST_COMMANDS)
        self._slow = CommandQueue("reservations, commits and drops", most=MAX_SLOW_COMMANDS)
        self.sim_standing = self._standing = SimStanding(service, identity, shape.rank_count, self._told)
        self._sim_service = service
        self._shape = shape
        self._requests = requests
        self._released: set[str] = set()
        self.era = 0  # of the engine's weights, for the next identity
        self.path_problems: dict[int, str] = {}  # as the workers said, by rank
        self.held: dict[str, tuple[str, int]] = {}  # lease -> request, tokens: what the scheduler was told it has
        self.sim_standing.attach()
        self._events.get()

    # ---- pumped --------------------------------------------------------------------------------------------------

    def run_fast(self, count_max: int) -> None:
        _run(self._fast, count_max)

    def run_slow(self, count_max: int) -> None:
        _run(self._slow, count_max)

    @property
    def is_path_open(self) -> bool:
        """On every rank."""
        return len(self.path_problems) == self._shape.rank_count and not any(self.path_problems.values())

    @property
    def is_idle(self) -> bool:
        """Is nothing on its way, in either direction?"""
        return self._fast.is_empty and self._slow.is_empty and self._events.empty()

    # ---- watched -------------------------------------------------------------------------------------------------

    def attach_as(self, identity: bytes) -> None:
        self._sim_service.eras[identity] = self.era
        super().attach_as(identity)

    def match(
        self,
        request_id: str,
        attempt: int,
        keys_of: Callable[[], Asked | None],
        deadline_s: float,
        trace: Headers = NO_HEADERS,
    ) -> None:
        request = self._requests[request_id]
        asking = Asking(request.text, request.num_tokens)

        def asked() -> Asked | None:
            self._sim_service.asking = asking
            return keys_of()

        super().match(request_id, attempt, asked, deadline_s, trace)

    def _ask_places(
        self, standing: Standing, possible: list[tuple[ReserveWish, tuple[bytes, ...]]]
    ) -> dict[int, Event]:
        self._sim_service.run_lengths = tuple(len(keys) for _, keys in possible)
        return super()._ask_places(standing, possible)

    def release(self, lease_ids: tuple[str, ...]) -> None:
        for lease_id in lease_ids:
            must(lease_id not in self._released, "a lease was released twice", lease_id)
            self._released.add(lease_id)
            request_id, _ = self.held.pop(lease_id, ("", 0))
            request = self._requests.get(request_id)
            is_loading = request is not None and request.status in (Status.LOADING, Status.ABORTED)
            must(not is_loading, "the lease of a load under way was released", request_id)
        super().release(lease_ids)

    def take_events(self) -> list[Event]:
        if self._events.empty():
            return []
        events = super().take_events()
        for event in events:
            if isinstance(event, Matched) and event.lease_id:
                tokens = event.stored.chunk_count * self._shape.chunk_tokens
                self.held[event.lease_id] = (event.request_id, tokens)
            elif isinstance(event, LeasesLost):
                for lease_id in event.lease_ids:
                    self.held.pop(lease_id, None)
        return events

    def check_answer(self, request: Request, local_tokens: int, answer: int | None) -> None:
        """What the scheduler says follows from the lease that it holds, and from nothing else."""
        promised = [tokens for request_id, tokens in self.held.values() if request_id == request.request_id]
        must(len(promised) <= 1, "two leases for one request", request.request_id)
        wanted = [max(0, promised[0] - local_tokens)] if promised and self.is_path_open else [0, None]
        must(answer in wanted, "the answer is not what was promised", request.request_id, answer, wanted)


def _run(commands: CommandQueue, count_max: int) -> None:
    """At most ``count_max``. Unlike on a thread, nothing that goes wrong in one is hidden."""
    for _ in range(count_max):
        command = None if commands.is_empty else commands.take()
        if command is None:
            return
        command()
