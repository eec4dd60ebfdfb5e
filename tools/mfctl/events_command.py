"""``mfctl events``: what has happened in a service, and what happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.tools.mfctl.output import format_option, print_document, print_table, printable, to_json
from meshfusion.tools.mfctl.served_source import pool_name_of, service_address
from meshfusion.tools.mfctl.service_access import access_to
from meshfusion.tools.mfctl.sources import explained, read_status

if TYPE_CHECKING:
    from meshfusion.dpu.api.event_types import Event

_DEADLINE_S = 5.0
_HEADERS = ("SEQUENCE", "TIME", "SEVERITY", "KIND", "WHAT")


@click.command()
@click.argument("path", type=click.Path(path_type=Path, readable=False), required=False)
@click.option(
    "--service", "address", metavar="ADDRESS",
    help="Ask the running service at unix:///path or host:port instead of that of the pool in PATH.",
)  # fmt: skip
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
    """
    from meshfusion.dpu.api.event_client import GrpcEventSource

    found_at = service_address(path, address, pool_name)
    wanted = pool_name_of(path, pool_name)
    if pool_name:
        read_status(None, address, pool_name, _DEADLINE_S)  # which refuses a name that the service does not know
    with closing(GrpcEventSource(found_at, access_to(found_at))) as source, explained(found_at):
        all_of_them = source.events(after_sequence, follow=follow)
        found = (event for event in all_of_them if not wanted or event.pool in ("", wanted))
        if follow:
            _print_each(found, output_format)
        elif output_format == "table":
            print_table(_HEADERS, [(e.sequence, _time(e), e.severity.value, e.kind, _text(e)) for e in found])
        else:
            print_document([event_object(event) for event in found], output_format)


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
        if output_format == "json":
            click.echo(to_json(event_object(event)))
        elif output_format == "yaml":
            click.echo("---")
            print_document(event_object(event), output_format)
        else:
            line = f"{event.sequence:<8}  {_time(event)}  {event.severity.value:<8}  {event.kind:<18}  {_text(event)}"
            click.echo(printable(line))


def _text(event: Event) -> str:
    return f"{event.pool}: {event.text}" if event.pool else event.text


def _time(event: Event) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.time_s))
