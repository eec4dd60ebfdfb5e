"""``mfctl lab``: guests with soft-RoCE and the kernel's NVMe-oF target, from the command line."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.tools.lab.machine import KINDS, Kind
from meshfusion.tools.lab.places import Places, default_cache
from meshfusion.tools.mfctl.output import format_option, print_document, print_fields

if TYPE_CHECKING:
    from meshfusion.tools.lab.guest import GuestRun
    from meshfusion.tools.lab.keeper import KeptGuest
    from meshfusion.tools.lab.qemu import EmulatedDrive

DEFAULT_LIFETIME_S = 8 * 3600.0
SHELL_DEADLINE_S = 8 * 3600.0
MAX_REPORTED_BYTES = 1 << 20
PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

kind_option = click.option(
    "--kind", type=click.Choice(KINDS), show_default="uml", help="uml: fast; tcg: with NVMe drives."
)
memory_option = click.option(
    "--memory",
    "memory_mib",
    type=click.IntRange(min=128),
    metavar="MIB",
    show_default="1536",
    help="The guest's memory.",
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that is the guest's /out: only what it writes there stays.",
)
env_option = click.option(
    "-e", "--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="To set, or to pass on; repeatable."
)
fresh_option = click.option("--fresh", is_flag=True, help="A guest of its own even if one is up.")


@click.group()
def lab() -> None:
    """Run commands in a guest with soft-RoCE and a kernel NVMe-oF target.

    The guest's root is this machine's /, read-only; what it changes is gone afterwards. The first run builds the
    guest's kernel, which takes about ten minutes of one processor.
    """


@lab.command(context_settings=PASSED_ON)
@kind_option
@memory_option
@out_option
@env_option
@fresh_option
@click.option(
    "--deadline", "deadline_s", default=300.0, show_default=True, metavar="SECONDS", help="Until it is ended."
)
@click.option(
    "--drive",
    "drives",
    multiple=True,
    metavar="MIB[,zone=MIB]",
    help="For tcg, an NVMe drive, or a zoned one; repeatable.",
)
@format_option
@click.argument("command", nargs=-1, required=True)
def run(
    kind: Kind | None,
    memory_mib: int | None,
    out: Path | None,
    variables: tuple[str, ...],
    fresh: bool,
    deadline_s: float,
    drives: tuple[str, ...],
    output_format: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in the guest that is up, else in one of its own. Exits as COMMAND does.

    With --format json or yaml, prints one object with the exit code, the times and the output's last MiB.
    """
    guest_run = _guest_run(command, kind, memory_mib, out, variables, deadline_s, drives)
    kept = None if fresh else _kept(kind, memory_mib, out, drives)
    sys.exit(_run(guest_run, kept, output_format))


@lab.command()
@kind_option
@memory_option
@out_option
@env_option
@fresh_option
@format_option
def shell(
    kind: Kind | None,
    memory_mib: int | None,
    out: Path | None,
    variables: tuple[str, ...],
    fresh: bool,
    output_format: str,
) -> None:
    """Open a shell in the guest that is up, else in one of its own. Exits as the shell does."""
    from dataclasses import replace

    from meshfusion.tools.lab.commands import terminal_size

    if not sys.stdin.isatty():
        raise click.UsageError("a shell needs a terminal; for scripts: mfctl lab run -- COMMAND")
    guest_run = _guest_run(("/bin/bash", "-l"), kind, memory_mib, out, variables, SHELL_DEADLINE_S, ())
    kept = None if fresh else _kept(kind, memory_mib, out, ())
    sys.exit(_run(replace(guest_run, terminal=terminal_size()), kept, output_format))


@lab.command()
@kind_option
@memory_option
@out_option
@click.option(
    "--lifetime",
    "lifetime_s",
    default=DEFAULT_LIFETIME_S,
    show_default=True,
    metavar="SECONDS",
    help="It lives so long at most.",
)
@format_option
def up(kind: Kind | None, memory_mib: int | None, out: Path | None, lifetime_s: float, output_format: str) -> None:
    """Keep a guest running in the background, for run and shell."""
    from meshfusion.tools.lab.background import bring_up
    from meshfusion.tools.lab.guest import ready_machine
    from meshfusion.tools.lab.keeper import already_up, keeper_lives

    state = _state()
    if keeper_lives(state):
        raise already_up()
    guest_run = _guest_run((), kind, memory_mib, out or state / "out", (), lifetime_s, ())
    ready_machine(guest_run.kind)  # here, where its progress is seen
    began = time.monotonic()
    kept = bring_up(state, guest_run)
    fields = {
        "kind": kept.kind,
        "kernel": kept.release,
        "memory_mib": kept.memory_mib,
        "out": kept.out,
        "pid": kept.pid,
        "boot_s": round(time.monotonic() - began, 2),
        "expires_unix_s": round(kept.expires_unix_s),
    }
    _report(fields, output_format)


@lab.command()
@format_option
def down(output_format: str) -> None:
    """End the guest in the background, and what runs in it."""
    from meshfusion.tools.lab.background import bring_down

    _report({"ended": "a guest" if bring_down(_state()) else "nothing: none was up"}, output_format)


@lab.group()
def dpu() -> None:
    """A virtual DPU: an Arm machine with NVMe drives, behind the files of the rshim driver, to be flashed."""


@dpu.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@format_option
def bfb(path: Path, output_format: str) -> None:
    """Make the BFB of a virtual DPU and put it at FILE.

    It is made of Debian's packages for arm64, from this machine's package source; they are kept for the next time.
    """
    import shutil

    from meshfusion.tools.lab.progress import elapsed_notes
    from meshfusion.tools.vdpu.image import prepared_bfb

    shutil.copyfile(prepared_bfb(Places(default_cache()).vdpu, elapsed_notes()), path)
    _report({"bfb": str(path), "size_bytes": path.stat().st_size}, output_format)


@dpu.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--index", type=click.IntRange(0, 63), default=0, show_default=True, metavar="N", help="N of its rshimN.")
@click.option(
    "--drives",
    type=click.IntRange(1, 8),
    default=2,
    show_default=True,
    metavar="COUNT",
    help="NVMe drives in its JBOF.",
)
@click.option(
    "--drive-size", "drive_mib", type=click.IntRange(64), default=1024, show_default=True, metavar="MIB",
    help="Of each, when it is made.",
)  # fmt: skip
@click.option(
    "--memory", "memory_mib", type=click.IntRange(1024), default=2048, show_default=True, metavar="MIB",
    help="The card's memory.",
)  # fmt: skip
@click.option(
    "--processors", type=click.IntRange(1, 16), default=2, show_default=True, metavar="COUNT", help="The card's."
)
@format_option
def serve(folder: Path, output_format: str, **options: int) -> None:
    """Keep a virtual DPU until interrupted; what its drives hold stays in FOLDER.

    Its rshim is FOLDER/rshimN, which `mfctl dpu` takes as a CARD, its tmfifo the interface tmfifo_netN of this machine.
    Needs root. A new one has nothing on its boot drive: flash it.
    """
    from meshfusion.tools.lab.progress import elapsed_notes
    from meshfusion.tools.vdpu.hardware import BOOT_SERIAL, drive_id
    from meshfusion.tools.vdpu.serve import CardWanted, serve
    from meshfusion.tools.vdpu.tmfifo import interface_of

    wanted = CardWanted(folder.absolute(), **options)
    fields: dict[str, object] = {
        "card": str(wanted.rshim),
        "host_interface": interface_of(wanted.index),
        "card_address": "192.168.100.2",
        "boot_drive": drive_id(BOOT_SERIAL),
        "console": str(wanted.folder / "console.log"),
    }
    serve(wanted, elapsed_notes(), lambda: _report(fields, output_format))


def _state() -> Path:
    return Places(default_cache()).guest


def _kept(kind: Kind | None, memory_mib: int | None, out: Path | None, drives: tuple[str, ...]) -> KeptGuest | None:
    """The guest that is up, if these options allow it."""
    from meshfusion.tools.lab.keeper import kept_guest

    kept = kept_guest(_state())
    options = {"--kind": kind, "--memory": memory_mib, "--out": out, "--drive": drives}
    given = [name for name, value in options.items() if value]
    if kept is not None and given and (given != ["--kind"] or kind != kept.kind):
        raise click.UsageError(f"a guest is up, and {', '.join(given)} cannot change it: add --fresh, or end it first")
    return kept


def _guest_run(
    command: tuple[str, ...],
    kind: Kind | None,
    memory_mib: int | None,
    out: Path | None,
    variables: Iterable[str],
    deadline_s: float,
    drives: Iterable[str],
) -> GuestRun:
    from meshfusion.tools.lab.guest import DEFAULT_MEMORY_MIB, GuestRun

    return GuestRun(
        command,
        kind=kind or "uml",
        environment=dict(_variable(text) for text in variables),
        output_directory=out,
        memory_mib=memory_mib or DEFAULT_MEMORY_MIB,
        deadline_s=deadline_s,
        drives=tuple(parse_drive(text) for text in drives),
    )


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if given:
        return name, value
    if name not in os.environ:
        raise click.BadParameter(f"{name} is not set here; give its value: {name}=VALUE", param_hint="--env")
    return name, os.environ[name]


def parse_drive(text: str) -> EmulatedDrive:
    """``256`` or ``256,zone=16``."""
    from meshfusion.tools.lab.qemu import EmulatedDrive

    size, _, zone = text.partition(",zone=")
    if not size.isdigit() or not (zone or "0").isdigit() or ("," in text and not zone):
        raise click.BadParameter(f"{text!r} is not MIB or MIB,zone=MIB", param_hint="--drive")
    size_mib, zone_mib = int(size), int(zone or 0)
    if not size_mib or (zone_mib and size_mib % zone_mib):
        raise click.BadParameter(f"{text!r}: the size must be a positive number of whole zones", param_hint="--drive")
    return EmulatedDrive(size_mib, zone_mib=zone_mib)


def _run(guest_run: GuestRun, kept: KeptGuest | None, output_format: str) -> int:
    from meshfusion.tools.lab.background import run_in_background_guest
    from meshfusion.tools.lab.commands import OutputTail, to_own_streams
    from meshfusion.tools.lab.guest import run_guest

    tail = OutputTail(MAX_REPORTED_BYTES)
    sink = to_own_streams if output_format == "table" else tail
    boot_s = 0.0
    if kept is not None:
        code, run_s = run_in_background_guest(kept, guest_run, sink)
    else:
        result = run_guest(guest_run, sink=sink)
        code, boot_s, run_s = result.exit_code, result.boot_s, result.run_s
    if output_format != "table":
        command = shlex.join(guest_run.command)
        times = {"boot_s": round(boot_s, 3), "run_s": round(run_s, 3)}
        told = {"command": command, "exit_code": code, **times, "stdout": tail.stdout, "stderr": tail.stderr}
        print_document(told, output_format)
    return code


def _report(fields: dict[str, object], output_format: str) -> None:
    if output_format != "table":
        print_document(fields, output_format)
    else:
        print_fields(fields.items())
