"""Sees every call of the server: how long, how it ended, under which request id; and logs it."""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import grpc
from google.protobuf.message import Message

from meshfusion.dpu.api.observer import Handle
from meshfusion.dpu.api.request_ids import current_request_id, printable_id, received_request_id
from meshfusion.dpu.api.trace_types import Trace, TracedCall
from meshfusion.dpu.api.tracing import REQUEST_ID, NobodyCollects, Tracer, received_headers
from meshfusion.dpu.line_limit import LineLimit
from meshfusion.dpu.telemetry.call_parts import CallPart, CallParts
from meshfusion.dpu.telemetry.table import RPC_BUCKETS_S

logger = logging.getLogger("meshfusion.access")

KEPT_SLOW_CALLS: Final = 100
KEPT_CALLS: Final = 4096  # for traces
KEPT_PARTS: Final = 4 * KEPT_CALLS  # of these: what they were to each of their requests
REPEATED_CALLS: Final = frozenset({"Heartbeat", "Status", "Drives", "ListChunks", "GetChunk"})
"""They belong to no request, and would push out those that do."""
SLOW_LINES_PER_MINUTE: Final = 20  # of the log; the ring and the counter have them all


@dataclass(frozen=True, slots=True)
class EndedCall:
    """``time_s``: Unix time of its end. ``code``: gRPC's name of how it ended."""

    time_s: float
    call: str
    seconds: float
    code: str
    request_id: str


class _Kept(NamedTuple):
    call: EndedCall
    parts: tuple[CallPart, ...]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Of one call. ``cumulative[i]``: how many took at most ``RPC_BUCKETS_S[i]``, the last one: all."""

    cumulative: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class CallCounts:
    """At one instant. ``codes``: by call and gRPC's status code."""

    times: dict[str, CallTimes]
    codes: dict[tuple[str, str], int]
    in_flight: int
    slow: int


@dataclass(slots=True)
class _Times:
    counts: list[int] = field(default_factory=lambda: [0] * (len(RPC_BUCKETS_S) + 1))
    sum_s: float = 0.0


class CallWatch:
    """Keeps the contract of :class:`~meshfusion.dpu.api.observer.CallObserver`.

    Kept as plain numbers, not as instruments of prometheus_client: those may lie in files that processes share, when
    the environment says so, and expose when they were made as further metrics.
    """

    def __init__(
        self,
        *,
        slow_call_s: float,
        clock: Callable[[], float] = time.monotonic,
        unix_time_s: Callable[[], float] = time.time,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or NobodyCollects()
        self._slow_call_s = slow_call_s
        self._clock = clock
        self._unix_time_s = unix_time_s
        self._mutex = threading.Lock()
        self._times: dict[str, _Times] = {}
        self._codes: Counter[tuple[str, str]] = Counter()
        self._in_flight = 0
        self._slow_count = 0
        self._slow: deque[EndedCall] = deque(maxlen=KEPT_SLOW_CALLS)
        self._limit = LineLimit(SLOW_LINES_PER_MINUTE)
        self._parts = CallParts()
        self._kept: deque[_Kept] = deque(maxlen=KEPT_CALLS)
        self._kept_part_count = 0
        self._here = threading.local()  # ``parts`` of the call that this thread answers

    def watch(self, call: str, handle: Handle) -> Handle:
        self._times[call] = _Times()

        def watched(raw: bytes, context: grpc.ServicerContext) -> bytes:
            metadata = context.invocation_metadata()
            request_id = received_request_id(metadata)
            attributes = {REQUEST_ID: request_id, "rpc.system": "grpc", "rpc.method": call}
            span = self._tracer.begin(
                f"meshfusion.service/{call}", received_headers(metadata), attributes, is_server=True
            )
            token = current_request_id.set(request_id)
            begun_s = self._clock()
            self._here.parts = ()
            with self._mutex:
                self._in_flight += 1
            try:
                return handle(raw, context)
            finally:
                code = _code_of(context)
                self._ended(call, self._clock() - begun_s, code, request_id)
                span.end(error="" if code == "OK" else code)
                current_request_id.reset(token)

        return watched

    def answered(self, call: str, request: Message, reply: Message | None) -> None:
        try:
            self._here.parts = self._parts.of(call, request, reply)
        except Exception:  # what was granted must reach the caller all the same
            logger.exception("%s cannot be traced: a defect of the service", call)

    def _keep(self, ended: EndedCall) -> None:
        """Under the mutex. Calls may serve many requests: what is kept is bounded by all of these together."""
        kept = _Kept(ended, getattr(self._here, "parts", ()))
        if len(self._kept) == self._kept.maxlen:
            self._kept_part_count -= len(self._kept.popleft().parts)
        self._kept.append(kept)
        self._kept_part_count += len(kept.parts)
        while self._kept_part_count > KEPT_PARTS:
            self._kept_part_count -= len(self._kept.popleft().parts)

    def trace(self, request_id: str) -> Trace:
        """See :class:`~meshfusion.dpu.api.trace_types.TraceSource`: of the last :data:`KEPT_CALLS` calls, but for those
        that repeat by themselves."""
        wanted = printable_id(request_id)
        with self._mutex:
            kept = tuple(self._kept)
        found = (traced for each in kept if (traced := _traced(each, wanted)) is not None)
        return Trace(tuple(found), kept[0].call.time_s if kept else 0.0)

    def counts(self) -> CallCounts:
        with self._mutex:
            times = {call: CallTimes(tuple(accumulate(t.counts)), t.sum_s) for call, t in self._times.items()}
            return CallCounts(times, dict(self._codes), self._in_flight, self._slow_count)

    def slow_calls(self) -> Sequence[EndedCall]:
        """The last ones, oldest first."""
        with self._mutex:
            return tuple(self._slow)

    def _ended(self, call: str, seconds: float, code: str, request_id: str) -> None:
        is_slow = seconds > self._slow_call_s
        passed_over = None
        ended = EndedCall(self._unix_time_s(), call, seconds, code, request_id)
        with self._mutex:
            self._in_flight -= 1
            if call not in REPEATED_CALLS:
                self._keep(ended)
            times = self._times[call]
            times.counts[bisect.bisect_left(RPC_BUCKETS_S, seconds)] += 1
            times.sum_s += seconds
            self._codes[call, code] += 1
            if is_slow:
                self._slow_count += 1
                self._slow.append(ended)
                passed_over = self._limit.take(self._clock())
        if passed_over is not None:
            more = f"; {passed_over} slow calls before it were not logged" if passed_over else ""
            logger.warning("%s took %.3f s (%s)%s", call, seconds, code, more)
        else:
            logger.debug("%s took %.6f s (%s)", call, seconds, code)


def _traced(kept: _Kept, request_id: str) -> TracedCall | None:
    """What the call was to the request; None where it was none of its."""
    call = kept.call
    counts = next((part.counts for part in kept.parts if part.request_id == request_id), None)
    if counts is None and call.request_id != request_id:
        return None
    return TracedCall(call.time_s, call.call, call.seconds, call.code, call.request_id, counts or ())


def _code_of(context: grpc.ServicerContext) -> str:
    """As it was set; a caller that has gone away meanwhile was not answered."""
    code = context.code()  # type: ignore[attr-defined]  # gRPC has it since 1.45, its types do not
    if code is None:
        return "OK" if context.is_active() else "CANCELLED"
    return str(code.name)
