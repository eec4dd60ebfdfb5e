"""``mfctl jbof drives|add|drain|remove|replace``: the drives of a pool, through its service where one runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.tools.mfctl.consent import agree, destructive
from meshfusion.tools.mfctl.output import format_bytes, format_option, print_document, print_table
from meshfusion.tools.mfctl.pool_commands import PATH, parse_size

if TYPE_CHECKING:
    from meshfusion.tools.mfctl.pool_drives_source import PoolDrivesSource

_NUMBER = click.argument("number", type=click.IntRange(0))
_SIZE = click.option(
    "--size", "size_bytes", callback=parse_size, required=True, metavar="SIZE", help="What is used of it."
)
_DATA_PATH = click.option("--data-path", type=PATH, help="The block device or file; default: a file inside POOL.")
_FORCE = click.option("--force", is_flag=True, help="Overwrite what is on the --data-path; needs --serial.")
_SERIAL = click.option(
    "--serial", metavar="TEXT",
    help="With --force: the serial of the drive that may be overwritten; of a file, its name without folders.",
)  # fmt: skip


@click.command()
@click.argument("pool", type=PATH)
@format_option
def drives(pool: Path, output_format: str) -> None:
    """Show the drives of the pool in POOL by their numbers, and what is wrong with one.

    Where a service runs it says how it uses them, and how long an NVMe drive lasts at the rate of the last day (an hour
    at least); else it is said what the next one would find.
    """
    rows = _source(pool).rows()
    if output_format != "table":
        print_document({"drives": rows}, output_format)
        return
    print_table(
        ["NUMBER", "STATE", "SEGMENTS", "SIZE", "USED", "MONTHS LEFT", "SERIAL", "WHERE"],
        [
            (
                *(row["number"], row["state"], row["segments"], format_bytes(row["size_bytes"])),
                "-" if row["percentage_used"] is None else f"{row['percentage_used']} %",
                "-" if row["months_left"] is None else f"{row['months_left']:.0f}",
                *(row["serial"], row["path"]),
            )
            for row in rows
        ],
    )
    for row in rows:
        for told in [*row["reasons"], *([row["problem"]] if row["problem"] else [])]:
            click.echo(f"drive {row['number']}: {told}", err=True)
        if row["next_step"] and (row["problem"] or row["state"] == "gone"):
            click.echo(f"next step: {row['next_step']}", err=True)


@click.command()
@click.argument("pool", type=PATH)
@_SIZE
@_DATA_PATH
@_FORCE
@_SERIAL
@format_option
def add(
    pool: Path, size_bytes: int, data_path: Path | None, force: bool, serial: str | None, output_format: str
) -> None:
    """Give the pool in POOL one more drive, while it is served or not.

    Nothing is written to it before all engines of this machine know of it, or by a host of a target before it says that
    it reaches it.
    """
    _check_force(data_path, force=force, serial=serial)
    number, segments = _source(pool).add(size_bytes, _absolute(data_path), serial)
    if output_format != "table":
        print_document({"number": number, "segments": segments}, output_format)
    else:
        click.echo(f"added drive {number} with {segments} segments")


@click.command()
@click.argument("pool", type=PATH)
@_NUMBER
@click.option("--stop", is_flag=True, help="Write to it again, and trust it again if it has failed.")
@destructive
@format_option
def drain(pool: Path, number: int, stop: bool, yes: bool, output_format: str) -> None:
    """Have drive NUMBER of the pool in POOL emptied.

    Nothing new is written to it; what it holds is forgotten bit by bit while a service runs, and served until then.
    --stop calls that off, and nothing is asked then; what was forgotten stays so.
    """
    source = _source(pool)
    _agree(source, pool, number, "is forgotten bit by bit", yes=yes or stop)
    source.drain(number, is_ended=stop)
    if output_format != "table":
        print_document({"number": number, "is_draining": not stop}, output_format)
    else:
        click.echo(f"drive {number} takes {'new chunks again' if stop else 'no new chunks any more'}")


@click.command()
@click.argument("pool", type=PATH)
@_NUMBER
@click.option(
    "--config", "config_path", type=PATH, metavar="FILE",
    help="The service's configuration: where none runs, and the pool was exported, so that its target can be asked.",
)  # fmt: skip
@destructive
@format_option
def remove(pool: Path, number: int, config_path: Path | None, yes: bool, output_format: str) -> None:
    """Take drive NUMBER out of the pool in POOL, with the chunks on it; it may be gone already.

    While an engine reads from it or may write to it, or its target has not confirmed that no host reaches it, that is
    waited for, a minute at most; where no service runs, no engine that used it may live. What is on it stays, but for a
    file inside POOL, which is deleted.
    """
    source = _source(pool)
    _agree(source, pool, number, "is forgotten at once", yes=yes)
    count = source.remove(number, config_path)
    if output_format != "table":
        print_document({"number": number, "chunks_forgotten": count}, output_format)
    else:
        click.echo(f"removed drive {number}; {count} chunks lay on it and are forgotten")


@click.command()
@click.argument("pool", type=PATH)
@_NUMBER
@_SIZE
@_DATA_PATH
@_FORCE
@_SERIAL
@destructive
@format_option
def replace(
    pool: Path,
    number: int,
    size_bytes: int,
    data_path: Path | None,
    force: bool,
    serial: str | None,
    yes: bool,
    output_format: str,
) -> None:
    """Add another drive to the pool in POOL, and have drive NUMBER emptied.

    When it is drained, or is gone: mfctl jbof remove.
    """
    _check_force(data_path, force=force, serial=serial)
    source = _source(pool)
    if number not in {row["number"] for row in source.rows()}:
        source.drain(number, is_ended=False)  # says what is wrong with it, before anything is added
    _agree(source, pool, number, "is forgotten bit by bit, when the other one is there", yes=yes)
    added, segments = source.add(size_bytes, _absolute(data_path), serial)
    source.drain(number, is_ended=False)
    if output_format != "table":
        print_document({"number": added, "segments": segments, "replaces": number}, output_format)
    else:
        click.echo(f"added drive {added} with {segments} segments; drive {number} takes no new chunks any more")


def _source(pool: Path) -> PoolDrivesSource:
    from meshfusion.tools.mfctl.pool_drives_source import drives_of

    return drives_of(pool)


def _agree(source: PoolDrivesSource, pool: Path, number: int, what_happens: str, *, yes: bool) -> None:
    """Of a drive that the pool does not have nothing is lost: what is to be done with it is then refused."""
    if yes:
        return
    row = next((row for row in source.rows() if row["number"] == number), None)
    if row is not None:
        known = (row["path"], f"serial {row['serial']}" if row["serial"] else "", format_bytes(row["size_bytes"]))
        drive = f"drive {number} ({', '.join(filter(None, known))}) of the pool {pool}"
        agree(f"Every chunk with a shard on {drive} {what_happens}: engines have to compute it anew.", yes=yes)


def _check_force(data_path: Path | None, *, force: bool, serial: str | None) -> None:
    if force != (serial is not None) or (force and data_path is None):
        raise click.UsageError("--force, --serial and --data-path belong together.")


def _absolute(data_path: Path | None) -> Path | None:
    """The service has another working directory. Links stay: a device's name by its id is the better one."""
    return None if data_path is None else Path(os.path.abspath(data_path))
