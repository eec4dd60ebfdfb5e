"""``mfctl jbof drives|add|drain|remove``: the drives of a pool that nobody serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshfusion.tools.mfctl.output import format_bytes, format_option, print_json, print_table
from meshfusion.tools.mfctl.pool_commands import PATH, parse_size

_NUMBER = click.argument("number", type=click.IntRange(0))


@click.command()
@click.argument("pool", type=PATH)
@format_option
def drives(pool: Path, output_format: str) -> None:
    """Show the drives of the pool in POOL by their numbers, and what keeps one away. It may be served meanwhile."""
    rows = _rows(pool)
    if output_format == "json":
        print_json({"drives": rows})
        return
    print_table(
        ["NUMBER", "STATE", "SEGMENTS", "SIZE", "SERIAL", "WHERE"],
        [
            (row["number"], row["state"], row["segments"], format_bytes(row["size_bytes"]), row["serial"], row["path"])
            for row in rows
        ],
    )
    for row in rows:
        if row["problem"]:
            click.echo(f"drive {row['number']}: {row['problem']}\nnext step: {row['next_step']}", err=True)


@click.command()
@click.argument("pool", type=PATH)
@click.option("--size", "size_bytes", callback=parse_size, required=True, metavar="SIZE", help="What is used of it.")
@click.option("--data-path", type=PATH, help="The block device or file; default: a file inside POOL.")
@click.option("--force", is_flag=True, help="Overwrite what is on the --data-path; needs --serial.")
@click.option(
    "--serial", metavar="TEXT",
    help="With --force: the serial of the drive that may be overwritten; of a file, its name without folders.",
)  # fmt: skip
@format_option
def add(
    pool: Path, size_bytes: int, data_path: Path | None, force: bool, serial: str | None, output_format: str
) -> None:
    """Give the pool in POOL one more drive. Nobody may use the pool meanwhile."""
    from meshfusion.dpu.pool_create import add_drive

    if force != (serial is not None) or (force and data_path is None):
        raise click.UsageError("--force, --serial and --data-path belong together.")
    label = add_drive(pool, size_bytes=size_bytes, data_path=data_path, overwrite_serial=serial)
    if output_format == "json":
        print_json({"number": label.drive_number, "segments": label.segment_count})
    else:
        click.echo(f"added drive {label.drive_number} with {label.segment_count} segments")


@click.command()
@click.argument("pool", type=PATH)
@_NUMBER
@click.option("--stop", is_flag=True, help="Write to it again.")
@format_option
def drain(pool: Path, number: int, stop: bool, output_format: str) -> None:
    """Write nothing new to drive NUMBER of the pool in POOL; what it holds is served until it is removed.

    Nobody may use the pool meanwhile.
    """
    from meshfusion.dpu.pool_remove import set_draining

    set_draining(pool, number, is_draining=not stop)
    if output_format == "json":
        print_json({"number": number, "is_draining": not stop})
    else:
        click.echo(f"drive {number} takes {'new chunks again' if stop else 'no new chunks any more'}")


@click.command()
@click.argument("pool", type=PATH)
@_NUMBER
@format_option
def remove(pool: Path, number: int, output_format: str) -> None:
    """Take drive NUMBER out of the pool in POOL, with the chunks on it; it may be gone already.

    Nobody may use the pool meanwhile, and no engine that used it may live. A drive is replaced by adding another one
    and removing this. What is on it stays, but for a file inside POOL, which is deleted.
    """
    from meshfusion.dpu.pool_remove import remove_drive

    count = remove_drive(pool, number)
    if output_format == "json":
        print_json({"number": number, "chunks_forgotten": count})
    else:
        click.echo(f"removed drive {number}; {count} chunks lay on it and are forgotten")


def _rows(pool: Path) -> list[dict[str, Any]]:
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.dpu.pool_drives import find_drives

    found = find_drives(PoolLayout(pool.absolute()))
    rows: list[dict[str, Any]] = [
        {
            "number": drive.number,
            "state": "draining" if drive.is_draining else "here",
            "segments": drive.label.segment_count,
            "size_bytes": drive.geometry.capacity_bytes,
            "serial": drive.label.drive_name,
            "path": str(drive.path),
            "problem": "; ".join(drive.label_problems),
            "next_step": "mfctl pool repair, when nobody uses the pool" if drive.label_problems else "",
        }
        for drive in found.here
    ]
    rows += [
        {
            "number": drive.number,
            "state": "away",
            "segments": 0,
            "size_bytes": 0,
            "serial": "",
            "path": "",
            "problem": drive.problem.message,
            "next_step": drive.problem.next_step,
        }
        for drive in found.absent
    ]
    return sorted(rows, key=lambda row: int(row["number"]))
