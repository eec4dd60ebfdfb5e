"""``mfctl pool``: create, check; the other commands are beside it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from meshfusion.jbof.errors import FormatError, MediaError
from meshfusion.tools.mfctl.encrypted_pools import drives_open
from meshfusion.tools.mfctl.output import (
    format_bytes,
    format_option,
    print_document,
)
from meshfusion.tools.mfctl.pool_key_commands import erase_key, rekey
from meshfusion.tools.mfctl.pool_repair_commands import rebuild_index, repair
from meshfusion.tools.mfctl.pool_status_command import status, status_object
from meshfusion.tools.mfctl.progress import Progress

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
        made = inspect_pool(path)
    if output_format != "table":
        print_document(status_object(made), output_format)
        return
    click.echo(
        f"created pool {made.pool_uuid} in {made.path}: {made.segment_count} segments of "
        f"{format_bytes(made.segment_bytes)}" + (f" on {len(drives)} drives" if len(drives) > 1 else "")
    )


def _key_place(header_dir: Path | None, key_file: Path | None) -> KeyPlace | None:
    from meshfusion.dpu.encryption.note import KeyPlace

    if (header_dir is None) != (key_file is None):
        raise click.UsageError("--header-dir and --key-file belong together.")
    if header_dir is None or key_file is None:
        return None
    return KeyPlace(header_dir.absolute(), key_file.absolute())


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


for command in (status, rebuild_index, repair, erase_key, rekey):
    pool.add_command(command)
