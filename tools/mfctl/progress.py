"""A progress bar on stderr, drawn only for a person; and what is told of work that is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class InterruptedWork(KeyboardInterrupt):
    """Work that is safe to be interrupted was. ``message``: how far it was, and how things are now."""

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step


@contextmanager
def told_when_interrupted(message: str, *, next_step: str) -> Iterator[None]:
    """For what goes on elsewhere, or has no count. Raises InterruptedWork for an interruption of the block."""
    try:
        yield
    except InterruptedWork:
        raise
    except KeyboardInterrupt as error:
        raise InterruptedWork(f"interrupted; {message}", next_step=next_step) from error


class Progress:
    """``title``: what is done; ``left``: how things are when it is interrupted, and ``next_step``: what to do then.
    ``update`` may be called as often as one likes."""

    def __init__(self, title: str, *, left: str, next_step: str = "Run the same command again.") -> None:
        self._title = title
        self._left = left
        self._next_step = next_step
        self._enabled = sys.stderr.isatty()
        self._done = self._total = 0

    def __enter__(self) -> Progress:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn(self._title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=None)
            self._bar.start()
        return self

    def update(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if self._enabled:
            self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raises InterruptedWork for an interruption, when what was under way has been undone or ended."""
        if self._enabled:
            self._bar.stop()
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, InterruptedWork):
            far = f" at {self._done} of {self._total}" if self._total else ""
            message = f"interrupted while {self._title}{far}; {self._left}"
            raise InterruptedWork(message, next_step=self._next_step) from error
