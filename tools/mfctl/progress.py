"""A progress bar on stderr, drawn only for a person."""

from __future__ import annotations

import sys


class Progress:
    """``title``: what is done; ``update`` may be called as often as one likes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._enabled = sys.stderr.isatty()

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
        if self._enabled:
            self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._bar.stop()
