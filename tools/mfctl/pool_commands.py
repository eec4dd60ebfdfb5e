"""``mfctl pool``: create, status, check; what changes a pool is beside it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from meshfusion.dpu.api.types import PoolStatus
from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.tools.mfctl.context_choice import Services, services_of
from meshfusion.tools.mfctl.encrypted_pools import drives_open
from meshfusion.tools.mfctl.output import (
    format_bytes,
    format_option,
    print_document,
    print_fields,
    print_table,
)
from meshfusion.tools.mfctl.pool_key_commands import erase_key, rekey
from meshfusion.tools.mfctl.pool_repair_commands import rebuild_index, repair
from meshfusion.tools.mfctl.progress import Progress
from meshfusion.tools.mfctl.sources import pool_status, service_status, source_options

if TYPE_CHECKING:
    from meshfusion.dpu.encryption.note import KeyPlace
    from meshfusion.dpu.pool_inspect import CheckReport


def parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    from meshfusion.jbof.sizes import parse_size_bytes

    try:
        return parse_size_bytes(value)
    except ValueError as e:
        raise click.BadParameter(str(e), ctx, param) from e


def _size_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else parse_size(ctx, param, value)


PATH = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step

_NOT_MADE = "there is no pool, and of what lay on a --data-path a part may be gone"
_UNCHANGED = "nothing was changed, and of the rest nothing is known"
_OWNED = "owned"  # not a count, though it comes among the counters of a pool read from its medium


@click.group()
def pool() -> None:
    """Create and examine pools."""


@pool.command()
@click.argument("path", type=PATH)
@click.option(
    "--size",
    "size_bytes",
    callback=parse_size,
    required=True,
    metavar="SIZE",
    help="Size of the data on each drive, for example 4GiB.",
)
@click.option(
    "--segment-size",
    "segment_bytes",
    callback=_size_or_none,
    metavar="SIZE",
    show_default="64MiB, or 1/2048 of the size where that is more",
    help="Unit of reclaim.",
)
@click.option(
    "--data-path", "data_paths", type=PATH, multiple=True,
    help="Block device or file for the data; default: a file inside PATH. Several times: a drive for each.",
)  # fmt: skip
@click.option(
    "--drives", "drive_count", type=click.IntRange(1, 255), metavar="N",
    help="Several files inside PATH instead of one, to try a pool of several drives.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite what is on the --data-path; needs --serial.")
@click.option(
    "--serial", metavar="TEXT",
    help="With --force: the serial of the drive that may be overwritten; of a file, its name without folders.",
)  # fmt: skip
@click.option(
    "--header-dir", type=PATH, metavar="DIRECTORY",
    help="Encrypt each --data-path, a block device, with its LUKS2 header here; needs --key-file.",
)  # fmt: skip
@click.option("--key-file", type=PATH, metavar="FILE", help="With --header-dir: the key, random and of mode 0600.")
@format_option
def create(
    path: Path,
    size_bytes: int,
    segment_bytes: int | None,
    data_paths: tuple[Path, ...],
    drive_count: int | None,
    force: bool,
    serial: str | None,
    header_dir: Path | None,
    key_file: Path | None,
    output_format: str,
) -> None:
    """Create an empty pool in PATH, a new or an empty directory.

    All that is on a --data-path is zeroed: fast where the drive can deallocate to zeros, else it is overwritten.
    """
    from meshfusion.dpu.pool import create_pool, inspect_pool
    from meshfusion.dpu.pool_create import create_pool_of_drives

    if force != (serial is not None) or (force and not data_paths):
        raise click.UsageError("--force, --serial and --data-path belong together.")
    if drive_count is not None and data_paths:
        raise click.UsageError("--drives makes files inside PATH; with --data-path, name it once for each drive.")
    encryption = _key_place(header_dir, key_file)
    drives = data_paths or (None,) * (drive_count or 1)
    if len(drives) == 1:
        data_path = drives[0]
        with Progress("zeroing", left=_NOT_MADE) as progress:
            create_pool(
                path,
                size_bytes=size_bytes,
                segment_bytes=segment_bytes,
                data_path=data_path,
                overwrite_serial=serial,
                tell=progress.update,
                encryption=encryption,
            )
    elif force:
        raise click.UsageError("--force is for one drive: create the pool on it, then add others: mfctl jbof add.")
    else:
        with Progress("zeroing", left=_NOT_MADE) as progress:
            create_pool_of_drives(
                path,
                size_bytes=size_bytes,
                segment_bytes=segment_bytes,
                data_paths=drives,
                tell=progress.update,
                encryption=encryption,
            )
    with drives_open(path):
        status = inspect_pool(path)
    if output_format != "table":
        print_document(status_object(status), output_format)
        return
    click.echo(
        f"created pool {status.pool_uuid} in {status.path}: {status.segment_count} segments of "
        f"{format_bytes(status.segment_bytes)}" + (f" on {len(drives)} drives" if len(drives) > 1 else "")
    )


def _key_place(header_dir: Path | None, key_file: Path | None) -> KeyPlace | None:
    from meshfusion.dpu.encryption.note import KeyPlace

    if (header_dir is None) != (key_file is None):
        raise click.UsageError("--header-dir and --key-file belong together.")
    if header_dir is None or key_file is None:
        return None
    return KeyPlace(header_dir.absolute(), key_file.absolute())


@pool.command()
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


@pool.command()
@click.argument("path", type=PATH)
@click.option(
    "--rate", "rate_bytes", callback=_size_or_none, metavar="SIZE",
    help="Read no more than this in a second, for example 200MiB, and leave the drive to whoever serves the pool.",
)  # fmt: skip
@format_option
def check(path: Path, rate_bytes: int | None, output_format: str) -> None:
    """Read every chunk of the pool in PATH and compare it with its digests.

    The pool may be served meanwhile. Exits 4 when something is damaged, and not with 0 when a drive is away, so that
    chunks could not be read. Nothing is changed.
    """
    from meshfusion.dpu.pool import check_pool

    rate_bytes_s = None if rate_bytes is None else float(rate_bytes)
    with drives_open(path), Progress("checking chunks", left=_UNCHANGED) as progress:
        report = check_pool(path, progress.update, rate_bytes_s=rate_bytes_s)
    if output_format != "table":
        print_document(report, output_format)
    else:
        click.echo(f"checked {report.chunks_checked} chunks, {format_bytes(report.bytes_checked)}")
        if report.chunks_away:
            click.echo(f"left out {report.chunks_away} chunks with a shard on a drive that is away")
        for entry in report.damaged:
            click.echo(f"damaged: {entry}")
        if report.index_damaged:
            click.echo(f"damaged: {report.index_damaged} entries of the index")
        for entry in (*report.segments_damaged, *report.label_problems):
            click.echo(f"damaged: {entry}")
    if report.label_problems:
        _raise_label_finding(path, report)
    if report.damaged or report.index_damaged or report.segments_damaged:
        segments = f", and the headers of {len(report.segments_damaged)} segments" if report.segments_damaged else ""
        raise FormatError(
            f"{len(report.damaged)} of {report.chunks_checked} chunks and {report.index_damaged} entries of the index "
            f"are damaged{segments}",
            next_step="Engines recompute them, and the service drops each that a load finds; `mfctl pool repair` drops "
            "all while the pool is not in use. If more appear, look at the drive's health.",
        )
    if report.chunks_away:
        raise MediaError(
            f"{report.chunks_away} chunks were not checked: a drive that they lie on is away",
            next_step=f"see which and why: mfctl jbof drives {shlex.quote(str(path))}",
        )


def _raise_label_finding(path: Path, report: CheckReport) -> NoReturn:
    chunks = f"; also {len(report.damaged)} chunks and {report.index_damaged} entries of the index are damaged"
    raise FormatError(
        "; ".join(report.label_problems) + (chunks if report.damaged or report.index_damaged else ""),
        next_step="The pool works with the other copy. Find out what wrote there, then when it is not in use, run "
        f"mfctl pool repair {shlex.quote(str(path))}",
    )


for command in (rebuild_index, repair, erase_key, rekey):
    pool.add_command(command)
