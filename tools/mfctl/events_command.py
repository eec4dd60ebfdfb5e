"""``mfctl events``: what has happened in a service, and what happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.tools.mfctl.output import format_option, print_document, print_one_of_many, print_table, printable
from meshfusion.tools.mfctl.served_source import pool_name_of, serving
from meshfusion.tools.mfctl.service_access import access_to
from meshfusion.tools.mfctl.sources import explained, service_option, service_status

if TYPE_CHECKING:
    from meshfusion.dpu.api.event_types import Event
    from meshfusion.tools.mfctl.context_types import Member

_DEADLINE_S = 5.0
HEADERS = ("SEQUENCE", "TIME", "SEVERITY", "KIND", "WHAT")


@click.command()
@click.argument("path", type=click.Path(path_type=Path, readable=False), required=False)
@service_option("Ask the running service at unix:///path or host:port instead of that of the pool in PATH.")
@click.option(
    "--pool", "pool_name", default="", metavar="NAME",
    help="With --service: only of that one of several pools, beside what is of no pool.",
)  # fmt: skip
@click.option(
    "--after", "after_sequence", type=click.IntRange(min=0), default=0, show_default=True, metavar="SEQUENCE",
    help="Only events after this one.",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Go on with those that come, until the service ends.")
@format_option
def events(
    path: Path | None, address: str | None, pool_name: str, after_sequence: int, follow: bool, output_format: str
) -> None:
    """Show what has happened in the service of a pool: engines, drives, saves, exports.

    Of a service of several pools: what is of that in PATH, or called by --pool, and what is of none; without either,
    of all. The last 1000 events since it began are known. With --follow each is printed when it comes: as a line, as
    a JSON object a line, or as a YAML document each. Kinds are in docs/events.md.

    Of a context that lists several services those of all are shown, and it does not exit with 0 when one did not
    answer.
    """
    services = serving(path, address, pool_name)
    wanted = pool_name_of(path, pool_name)
    if services.is_cluster:
        from meshfusion.tools.mfctl.cluster_events import show_events_of_all

        if after_sequence:
            raise click.UsageError("--after is of one service, and the context lists several: add --service NAME.")
        show_events_of_all(services, wanted, output_format, follow=follow)
        return
    found = service_events(services.only, wanted, after_sequence, follow=follow)
    if follow:
        _print_each(found, output_format)
    elif output_format == "table":
        print_table(HEADERS, [event_row(event) for event in found])
    else:
        print_document([event_object(event) for event in found], output_format)


def service_events(member: Member, pool_name: str, after_sequence: int = 0, *, follow: bool = False) -> Iterator[Event]:
    """Of the pool of that name, where one is named, and what is of none.

    Raises ServiceError of a name that the service does not know, and when it does not answer.
    """
    from meshfusion.dpu.api.event_client import GrpcEventSource

    at = member.address
    if pool_name:
        service_status(at, pool_name, _DEADLINE_S)  # which refuses a name that the service does not know
    with closing(GrpcEventSource(at, access_to(at))) as source, explained(at):
        for event in source.events(after_sequence, follow=follow):
            if not pool_name or event.pool in ("", pool_name):
                yield event


def event_row(event: Event) -> tuple[object, ...]:
    return event.sequence, _time(event), event.severity.value, event.kind, _text(event)


def event_object(event: Event) -> dict[str, Any]:
    """The form for programs."""
    return {
        "sequence": event.sequence,
        "time_s": event.time_s,
        "kind": event.kind,
        "severity": event.severity.value,
        "text": event.text,
        "pool": event.pool,
        "fields": dict(event.fields),
    }


def _print_each(found: Iterator[Event], output_format: str) -> None:
    for event in found:
        if output_format != "table":
            print_one_of_many(event_object(event), output_format)
        else:
            click.echo(event_line(event))


def event_line(event: Event) -> str:
    line = f"{event.sequence:<8}  {_time(event)}  {event.severity.value:<8}  {event.kind:<18}  {_text(event)}"
    return printable(line)


def _text(event: Event) -> str:
    return f"{event.pool}: {event.text}" if event.pool else event.text


def _time(event: Event) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.time_s))
