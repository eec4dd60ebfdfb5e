"""``mfctl pool status``: what a pool holds and who uses it, of one service, of all of a context, or from its medium."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from meshfusion.dpu.api.types import PoolStatus
from meshfusion.tools.mfctl.context_choice import Services, services_of
from meshfusion.tools.mfctl.output import format_bytes, format_option, print_document, print_fields, print_table
from meshfusion.tools.mfctl.sources import pool_status, service_status, source_options

PATH = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step

_OWNED = "owned"  # not a count, though it comes among the counters of a pool read from its medium


@click.command()
@click.argument("path", type=PATH, required=False)
@source_options
@format_option
def status(path: Path | None, address: str | None, pool_name: str, timeout_s: float, output_format: str) -> None:
    """Show what a pool holds and who uses it.

    From PATH, it is read beside whoever owns the pool and shows what is on the medium; leases, grants, holders and
    which segments are open are known only to the service: use --service. Both tell the same segments in use. Of a
    context that lists several services all are shown, and it does not exit with 0 when one did not answer.
    """
    services = services_of(path, address, pool_name)
    if services is not None and services.is_cluster:
        _print_status_of_all(services, pool_name, timeout_s, output_format)
        return
    if services is None:
        assert path is not None
        result = pool_status(path)
    else:
        result = service_status(services.only.address, pool_name, timeout_s)
    if output_format != "table":
        print_document(status_object(result), output_format)
    else:
        _print_status(result, live=services is not None)


def _print_status_of_all(services: Services, pool_name: str, timeout_s: float, output_format: str) -> None:
    from meshfusion.tools.mfctl.cluster import ask_all, end_with_errors, print_answers, tell_errors
    from meshfusion.tools.mfctl.cluster_status import STATUS_HEADERS, status_row

    answers = ask_all(
        services.members,
        lambda member: service_status(member.address, pool_name, timeout_s),
        within_s=timeout_s + 1.0,
    )
    if output_format != "table":
        print_answers(services, answers, status_object, output_format)
    else:
        print_table(STATUS_HEADERS, map(status_row, answers))
        tell_errors(answers)
    end_with_errors(answers)


def status_object(status: PoolStatus) -> dict[str, Any]:
    """The JSON form: the fields of :class:`PoolStatus`, counters as an object, and how many segments are in use, which
    on the medium cannot be told to be open or sealed: there all are in ``segments_sealed``. Read from the medium it
    also has ``owned``: does a process serve the pool?"""
    counters = dict(status.counters)
    owned = counters.pop(_OWNED, None)
    shown = {} if owned is None else {"owned": bool(owned)}
    return {**dataclasses.asdict(status), "segments_used": _used_segments(status), **shown, "counters": counters}


def _used_segments(status: PoolStatus) -> int:
    return status.segments_open + status.segments_sealed


def _print_status(s: PoolStatus, *, live: bool) -> None:
    segments = (
        f"{s.segment_count} of {format_bytes(s.segment_bytes)}: {s.segments_free} free, {_used_segments(s)} in use"
    )
    if live:
        segments += f" ({s.segments_open} open, {s.segments_sealed} sealed); {s.segments_quarantined} quarantined"
    fields: list[tuple[str, object]] = [
        ("pool", s.pool_uuid),
        ("path", s.path),
        ("format", f"version {s.format_version}, {s.lba_bytes}-byte blocks"),
        ("epoch", s.epoch),
        ("capacity", format_bytes(s.capacity_bytes)),
        ("segments", segments),
        ("chunks", f"{s.committed_chunk_count} ({format_bytes(s.committed_payload_bytes)})"),
    ]
    counters = dict(s.counters)
    owned = counters.pop(_OWNED, None)
    if owned is not None:
        fields.append(("in use", "yes, a process owns the pool" if owned else "no"))
    if live:
        fields += [
            ("leases", f"{s.lease_count}, pinning {format_bytes(s.pinned_bytes)}"),
            ("grants", s.grant_count),
            ("saves", f"STOPPED: {s.saves_stopped_reason}" if s.saves_stopped_reason else "accepted"),
        ]
        if s.exports_problem:
            fields.append(("exports", f"NOT AS THEY SHOULD BE: {s.exports_problem}"))
    print_fields(fields)
    if s.holders:
        click.echo()
        print_table(
            ["HOLDER", "STATE", "ACCESS", "ENGINE", "HOST", "PID", "LEASES", "GRANTS", "SILENT"],
            [
                (
                    *(h.holder_id, h.state, h.access, f"{h.engine_kind} {h.engine_version}", h.host, h.pid),
                    *(h.lease_count, h.grant_count, f"{h.silent_s:.1f} s"),
                )
                for h in s.holders
            ],
        )
    if counters:
        click.echo()
        print_table(["COUNTER", "VALUE"], counters.items())
