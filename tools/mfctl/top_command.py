"""``mfctl top``: what a service does, looked at again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import (
    format_bytes,
    format_option,
    print_document,
    print_fields,
    print_one_of_many,
    print_table,
)
from meshfusion.tools.mfctl.served_source import pool_name_of, serving
from meshfusion.tools.mfctl.sources import service_option
from meshfusion.tools.mfctl.top_rates import top_object
from meshfusion.tools.mfctl.top_watch import Watched, begin_look, format_rate

if TYPE_CHECKING:
    from meshfusion.tools.mfctl.context_types import Member


@click.command()
@click.argument("path", type=click.Path(path_type=Path, readable=False), required=False)
@service_option("Ask the running service at unix:///path or host:port instead of that of the pool in PATH.")
@click.option(
    "--pool", "pool_name", default="", metavar="NAME", help="With --service: which pool, where it has several.",
)  # fmt: skip
@click.option(
    "--interval", "interval_s", type=FiniteRange(0.1, 3600), default=2.0, show_default=True, metavar="SECONDS",
    help="From one look to the next; rates are of this time.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Look twice, print what was done in between, and end.")
@format_option
def top(
    path: Path | None, address: str | None, pool_name: str, interval_s: float, once: bool, output_format: str
) -> None:
    """Show what the service of a pool does: lookups, hits and saves a second, its drives and engines.

    Goes on until it is interrupted. With --format json each look is an object a line, with yaml a document. Of a
    context that lists several services each is a line; one that does not answer is said to, and looked for again.
    """
    services = serving(path, address, pool_name)
    wanted = pool_name_of(path, pool_name)
    if services.is_cluster:
        from meshfusion.tools.mfctl.cluster_top import show_top_of_all

        show_top_of_all(services, wanted, interval_s, output_format, once=once)
        return
    looks = _looks(services.only, wanted, interval_s)
    for number, found in enumerate(looks):
        if output_format == "table":
            begin_look(is_first=not number)
            _print(found)
        elif once:
            print_document(found, output_format)
        else:
            print_one_of_many(found, output_format)
        if once:
            return


def _looks(member: Member, pool_name: str, interval_s: float) -> Iterator[dict[str, Any]]:
    """Without end, an interval apart."""
    with closing(Watched(member, pool_name)) as watched:
        before = watched.look()
        while True:
            time.sleep(interval_s)
            now = watched.look()
            yield top_object(before, now)
            before = now


def _print(found: dict[str, Any]) -> None:
    segments = ", ".join(f"{count} {state}" for state, count in found["segments"].items())
    share = found["hit_share"]
    print_fields(
        [
            ("pool", f"{found['pool_uuid']}, epoch {found['epoch']}"),
            ("chunks", f"{found['chunks']} ({format_bytes(found['payload_bytes'])})"),
            ("segments", f"{segments} of {format_bytes(found['capacity_bytes'])}"),
            ("leases", f"{found['leases']}, pinning {format_bytes(found['pinned_bytes'])}"),
            ("grants", found["grants"]),
            ("saves", f"STOPPED: {found['saves_stopped_reason']}" if found["saves_stopped_reason"] else "accepted"),
            *([("exports", f"NOT AS THEY SHOULD BE: {found['exports_problem']}")] if found["exports_problem"] else []),
            ("hits", "-" if share is None else f"{share:.1%} of what was looked up"),
        ]
    )
    click.echo()
    per_second = found["per_second"]
    if per_second is None:
        click.echo("the service began anew: there are no rates yet")
    else:
        print_table(["A SECOND", "RATE"], [(name, format_rate(name, rate)) for name, rate in per_second.items()])
    click.echo()
    drives = [(d["number"], d["state"], _known(d["percentage_used"]), d["problem"]) for d in found["drives"]]
    print_table(["DRIVE", "STATE", "USED %", "PROBLEM"], drives)
    if found["holders"]:
        click.echo()
        holders = [
            (*(h["holder_id"], h["state"], h["host"], h["pid"], h["leases"], h["grants"]), f"{h['silent_s']:.1f} s")
            for h in found["holders"]
        ]
        print_table(["HOLDER", "STATE", "HOST", "PID", "LEASES", "GRANTS", "SILENT"], holders)


def _known(value: object) -> object:
    return "-" if value is None else value
