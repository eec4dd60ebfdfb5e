"""Commands that lose something for good: they say what, and do it only when that is agreed to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from meshfusion.tools.mfctl.exit_codes import EXIT_INTERRUPTED

F = TypeVar("F", bound=Callable[..., Any])

_MARK: Final = "loses_something"


def destructive(command: F) -> F:
    """Marks a command that has to call :func:`agree`, and adds ``--yes``; the command gets ``yes``."""
    setattr(command, _MARK, True)
    return click.option("--yes", is_flag=True, help="Do not ask.")(command)


def is_destructive(command: click.Command) -> bool:
    return bool(getattr(command.callback, _MARK, False))


def agree(lost: str, *, yes: bool) -> None:
    """``lost``: a sentence that names what will be lost, and of what. Asks on stderr, so that stdout stays a document.

    Raises click.UsageError where there is no terminal to ask at, and ends the command when it is not agreed to.
    """
    if yes:
        return
    if not has_terminal():
        raise click.UsageError(f"{lost} There is no terminal to ask at: --yes says that this is meant.")
    click.echo(lost, err=True)
    if not click.confirm("Go on?", err=True):
        click.echo("nothing was done", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED)


def has_terminal() -> bool:
    return sys.stdin.isatty()
