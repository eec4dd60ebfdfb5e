"""Between wire messages and value types: what a service remembers of its calls. Pure functions."""

from __future__ import annotations

from meshfusion.dpu.api.limits import check_count, check_id, check_int, check_seconds, check_text
from meshfusion.dpu.api.trace_types import Trace, TracedCall
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

MAX_CALLS = 65_536
MAX_COUNTS = 64


def trace_to_pb(trace: Trace) -> pb.TraceReply:
    return pb.TraceReply(calls=map(_call_to_pb, trace.calls), kept_since_s=trace.kept_since_s)


def trace_from_pb(m: pb.TraceReply) -> Trace:
    check_count("calls", m.calls, MAX_CALLS)
    return Trace(tuple(map(_call_from_pb, m.calls)), check_seconds("kept_since_s", m.kept_since_s))


def _call_to_pb(call: TracedCall) -> pb.TracedCall:
    return pb.TracedCall(
        time_s=call.time_s,
        call=call.call,
        seconds=call.seconds,
        code=call.code,
        sent_under=call.sent_under,
        counts=[pb.Counter(name=name, value=value) for name, value in call.counts],
    )


def _call_from_pb(m: pb.TracedCall) -> TracedCall:
    check_count("call.counts", m.counts, MAX_COUNTS)
    return TracedCall(
        time_s=check_seconds("call.time_s", m.time_s),
        call=check_id("call.call", m.call),
        seconds=check_seconds("call.seconds", m.seconds),
        code=check_id("call.code", m.code),
        sent_under=check_text("call.sent_under", m.sent_under),
        counts=tuple((check_id("count.name", c.name), check_int("count.value", c.value)) for c in m.counts),
    )
