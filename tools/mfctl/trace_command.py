"""``mfctl trace``: what a service did for one request of an engine."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_option, print_document, print_table
from meshfusion.tools.mfctl.served_source import serving
from meshfusion.tools.mfctl.service_access import access_to
from meshfusion.tools.mfctl.sources import explained, service_option

if TYPE_CHECKING:
    from meshfusion.dpu.api.trace_types import Trace, TracedCall
    from meshfusion.tools.mfctl.context_choice import Services
    from meshfusion.tools.mfctl.context_types import Member

_HEADERS = ("ENDED", "CALL", "TOOK", "OUTCOME", "WHAT")


@click.command()
@click.argument("request_id")
@click.argument("path", type=click.Path(path_type=Path, readable=False), required=False)
@service_option("Ask the running service at unix:///path or host:port instead of that of the pool in PATH.")
@click.option(
    "--timeout", "timeout_s", type=FiniteRange(0.01, 600), default=5.0, show_default=True, metavar="SECONDS",
    help="How long to wait for an answer of the service.",
)  # fmt: skip
@format_option
def trace(request_id: str, path: Path | None, address: str | None, timeout_s: float, output_format: str) -> None:
    """Show the calls that a pool's service answered for one request of an engine: when, how long, with what outcome,
    and how many chunks were found, granted room and committed.

    REQUEST_ID is the engine's own, as its log and the service's have it. The service remembers its last 4096 calls,
    without heartbeats and status. A call that served several requests is shown under each, with its chunks alone. Of a
    context that lists several services the calls of all are shown, and it does not exit with 0 when one did not answer.
    """
    services = serving(path, address)
    if services.is_cluster:
        _show_of_all(services, request_id, timeout_s, output_format)
        return
    found = _trace_of(services.only, request_id, timeout_s)
    if not found.calls:
        raise _nothing_of(request_id, found)
    if output_format == "table":
        print_table(_HEADERS, [_row(call) for call in found.calls])
    else:
        print_document([_object(call) for call in found.calls], output_format)


def _trace_of(member: Member, request_id: str, timeout_s: float) -> Trace:
    from meshfusion.dpu.api.trace_client import GrpcTraceSource

    at = member.address
    with closing(GrpcTraceSource(at, access_to(at), deadline_s=timeout_s)) as source, explained(at):
        return source.trace(request_id)


def _show_of_all(services: Services, request_id: str, timeout_s: float, output_format: str) -> None:
    """The chunks of one request may be those of several services."""
    from meshfusion.tools.mfctl.cluster import ask_all, end_with_errors, print_answers, tell_errors

    answers = ask_all(
        services.members, lambda member: _trace_of(member, request_id, timeout_s), within_s=timeout_s + 1.0
    )
    calls = [(a.member.name, call) for a in answers if a.value is not None for call in a.value.calls]
    if output_format != "table":
        print_answers(services, answers, lambda found: [_object(call) for call in found.calls], output_format)
    else:
        in_order = sorted(calls, key=lambda one: one[1].time_s)
        print_table(("SERVICE", *_HEADERS), [(name, *_row(call)) for name, call in in_order])
        tell_errors(answers)
    end_with_errors(answers)
    if not calls:
        raise _nothing_of(request_id, min((a.value for a in answers if a.value), key=lambda found: found.kept_since_s))


def _nothing_of(request_id: str, found: Trace) -> ServiceError:
    since = f", which reach back to {_time(found.kept_since_s)}" if found.kept_since_s else ""
    return ServiceError(
        f"no call of request {request_id!r} is among those that the service remembers{since}",
        next_step="check the id in the engine's log, where vLLM may have added to the one of its client; of earlier "
        "calls, the service's log has lines with their request_id where log.level is debug",
    )


def _row(call: TracedCall) -> tuple[str, ...]:
    what = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in call.counts)
    return _time(call.time_s), call.call, f"{call.seconds * 1000:.2f} ms", call.code, what


def _object(call: TracedCall) -> dict[str, Any]:
    """The form for programs."""
    return {
        "time_s": call.time_s,
        "call": call.call,
        "seconds": call.seconds,
        "code": call.code,
        "sent_under": call.sent_under,
        "counts": dict(call.counts),
    }


def _time(unix_time_s: float) -> str:
    whole_s = int(unix_time_s)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole_s)) + f".{int((unix_time_s - whole_s) * 1000):03}Z"
