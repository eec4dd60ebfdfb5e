"""How the work on cards stands, on stderr: bars for a person, a line for each phase in a log."""

from __future__ import annotations

import enum
import sys
from typing import Protocol

import click


class Standing(Protocol):
    """``done`` of ``total``: of the phase, in bytes where there is no ``text``."""

    @property
    def phase(self) -> enum.Enum: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def text(self) -> str: ...


class FlashProgress:
    """For use by one thread. ``is_quiet``: say nothing, since what is printed is for a program."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._has_bars = sys.stderr.isatty() and not is_quiet
        self._said: dict[str, tuple[str, str]] = {}

    def __enter__(self) -> FlashProgress:
        if self._has_bars:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.fields[card]}"), BarColumn(), TextColumn("{task.description}"))
            self._bars = Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._tasks: dict[str, int] = {}
            self._bars.start()
        return self

    def update(self, card: str, progress: Standing) -> None:
        if self._has_bars:
            from rich.progress import TaskID

            task = self._tasks.get(card)
            if task is None:
                task = self._tasks[card] = self._bars.add_task("", card=card)
            total = progress.total or None
            self._bars.update(TaskID(task), completed=progress.done, total=total, description=_text(progress))
        elif not self._is_quiet:
            now = (progress.phase.value, progress.text)
            if self._said.get(card) != now:
                self._said[card] = now
                click.echo(f"{card}: {': '.join(filter(None, now))}", err=True)

    def ended(self, card: str) -> None:
        if self._has_bars and card in self._tasks:
            from rich.progress import TaskID

            self._bars.remove_task(TaskID(self._tasks.pop(card)))

    def __exit__(self, *_: object) -> None:
        if self._has_bars:
            self._bars.stop()


def _text(progress: Standing) -> str:
    from meshfusion.tools.mfctl.output import format_bytes

    if progress.text or not progress.total:
        return ": ".join(filter(None, (progress.phase.value, progress.text)))
    return f"{progress.phase.value}: {format_bytes(progress.done)} of {format_bytes(progress.total)}"
