"""Commands from one thread to another, so many at most (rule 8): who gives them never waits, and is told of no room."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("meshfusion.client")

Command = Callable[[], None]


class CommandQueue:
    """``name``: for the log, which tells once that it is full, until it is empty again."""

    def __init__(self, name: str, *, most: int) -> None:
        self._name, self._most = name, most
        self._change = threading.Condition()
        self._commands: deque[Command] = deque()
        self._is_closed = False
        self._is_told = False

    @property
    def is_empty(self) -> bool:
        with self._change:
            return not self._commands

    def offer(self, command: Command, *, behind: int | None = None) -> bool:
        """Is it taken? Else nothing of it is done: the giver is to do what follows from that. ``behind``: it is not,
        where so many wait already; None: as many as there is room for."""
        with self._change:
            if len(self._commands) < (self._most if behind is None else min(behind, self._most)):
                self._commands.append(command)
                self._change.notify()
                return True
            was_told, self._is_told = self._is_told, True
        if not was_told:
            logger.warning("too many %s wait for the chunk service: not all are taken", self._name)
        return False

    def take(self) -> Command | None:
        """Waits for one; None when it is closed and all have been taken."""
        with self._change:
            self._change.wait_for(lambda: self._commands or self._is_closed)
            if not self._commands:
                return None
            command = self._commands.popleft()
            self._is_told = self._is_told and bool(self._commands)
            return command

    def close(self) -> None:
        """What is in it may still be taken."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
