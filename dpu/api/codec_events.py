"""Between wire messages and value types: what happened in a service. Pure functions."""

from __future__ import annotations

from meshfusion.dpu.api.event_types import Event, Severity
from meshfusion.dpu.api.limits import check_count, check_id, check_int, check_seconds, check_text, malformed
from meshfusion.dpu.api.v1 import chunk_pb2 as pb

MAX_FIELDS = 64


def event_to_pb(event: Event) -> pb.Event:
    return pb.Event(
        sequence=event.sequence,
        time_s=event.time_s,
        kind=event.kind,
        severity=event.severity.value,
        text=event.text,
        fields=[pb.EventField(name=name, value=value) for name, value in event.fields],
        pool=event.pool,
    )


def event_from_pb(m: pb.Event) -> Event:
    check_count("event.fields", m.fields, MAX_FIELDS)
    return Event(
        sequence=check_int("event.sequence", m.sequence, 1),
        time_s=check_seconds("event.time_s", m.time_s),
        kind=check_id("event.kind", m.kind),
        severity=_severity(m.severity),
        text=check_text("event.text", m.text),
        fields=tuple((check_id("event.field", f.name), check_text(f.name, f.value)) for f in m.fields),
        pool=check_id("event.pool", m.pool) if m.pool else "",
    )


def _severity(value: str) -> Severity:
    try:
        return Severity(value)
    except ValueError:
        known = ", ".join(severity.value for severity in Severity)
        raise malformed("event.severity", f"is {value!r}, not one of {known}") from None
