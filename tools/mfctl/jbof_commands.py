"""``mfctl jbof``: list, show, wear, locate; the drives of a pool are beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.tools.mfctl import drive_sources
from meshfusion.tools.mfctl.drive_sources import discovered, drive_options, find_drive
from meshfusion.tools.mfctl.jbof_pool_commands import add, drain, drives, remove, replace
from meshfusion.tools.mfctl.output import format_option, print_document, print_fields, print_table

if TYPE_CHECKING:
    from meshfusion.jbof.drives.drive import Found


@click.group()
def jbof() -> None:
    """See the drives: what they are, how they are, where they stand; and those of a pool.

    Drives are named by their key (serial number and identifier), serial number, or slot; those of a pool by their
    number in it. Reading them needs root.
    """


@jbof.command("list")
@drive_options
@format_option
def list_command(files: tuple[Path, ...], spdk: Path | None, domains: Path | None, output_format: str) -> None:
    """Show all drives, and what was passed over and why."""
    from meshfusion.tools.mfctl.drive_report import LIST_HEADERS, found_object, list_row

    found = discovered(files, spdk, domains)
    if output_format != "table":
        print_document(found_object(found), output_format)
        return
    print_table(LIST_HEADERS, [list_row(drive) for drive in found.drives])
    for drive in found.drives:
        if drive.capabilities.problem:
            click.echo(f"{drive.identity} cannot hold a pool: {drive.capabilities.problem}", err=True)
        if drive.users:
            click.echo(f"{drive.identity} is in use by {', '.join(drive.users)}", err=True)
    _tell_passed(found)


def _tell_passed(found: Found) -> None:
    for passed in found.passed:
        click.echo(f"passed over {passed.where}: {passed.reason}", err=True)
    if not found.drives and not found.passed:
        click.echo("no drives here; --file PATH takes files for drives", err=True)


@jbof.command()
@click.argument("drive")
@drive_options
@format_option
def show(drive: str, files: tuple[Path, ...], spdk: Path | None, domains: Path | None, output_format: str) -> None:
    """Show all that is known of DRIVE: sizes, hints, capabilities, health, wear, failure domain."""
    from meshfusion.tools.mfctl.drive_report import drive_object, flat_fields

    described = drive_object(find_drive(discovered(files, spdk, domains), drive))
    if output_format != "table":
        print_document(described, output_format)
    else:
        print_fields(flat_fields(described))


@jbof.command()
@drive_options
@format_option
def wear(files: tuple[Path, ...], spdk: Path | None, domains: Path | None, output_format: str) -> None:
    """Show what was written to each drive, and how long it lasts if it goes on as in its life so far."""
    from meshfusion.tools.mfctl.drive_report import WEAR_HEADERS, wear_object, wear_row

    found = discovered(files, spdk, domains)
    if output_format != "table":
        print_document({"drives": [wear_object(drive) for drive in found.drives]}, output_format)
        return
    print_table(WEAR_HEADERS, [wear_row(drive) for drive in found.drives])
    _tell_passed(found)


@jbof.command()
@click.argument("drive")
@click.option("--off", is_flag=True, help="Switch the light off again.")
@drive_options
@format_option
def locate(
    drive: str, off: bool, files: tuple[Path, ...], spdk: Path | None, domains: Path | None, output_format: str
) -> None:
    """Make the light of DRIVE's slot blink. Says so where there is none that can be switched."""
    from meshfusion.jbof.drives.drive import DriveKind
    from meshfusion.jbof.drives.system.enclosure import blink, slot_of

    found = find_drive(discovered(files, spdk, domains), drive)
    if found.kind is DriveKind.FILE:
        raise UnsupportedError(
            f"{found.where} is a file and has no light", next_step="Look for it with: ls -l " + found.where
        )
    slot = slot_of(drive_sources.SYSFS, found.location.address)
    blink(slot, found.identity.key, on=not off)
    if output_format != "table":
        print_document({"key": found.identity.key, "slot": slot.name, "is_blinking": not off}, output_format)
    else:
        click.echo(f"the light of {found.identity.key} in slot {slot.name} is {'off' if off else 'blinking'}")


for command in (add, drain, drives, remove, replace):
    jbof.add_command(command)
