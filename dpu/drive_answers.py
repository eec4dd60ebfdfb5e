"""Commands to a drive that whoever gave them stops waiting for when the drive hangs.

Each runs on a thread of its own. One that hangs keeps its thread, its memory and its file until the drive answers or
Linux gives up on it, and until then nothing else is asked of the drive: a write or a deallocation of unknown fate may
land late, and must find what it was meant for (rules 2 and 3). That holds whatever file the drive is reached by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from meshfusion.dpu.pool_medium import BlockMedium
from meshfusion.jbof.errors import MediaError

Answer = TypeVar("Answer")


class HangingDriveError(MediaError):
    """A drive has not answered in time. ``is_news``: to this command; else to one before, and nothing was asked."""

    def __init__(self, number: int, deadline_s: float, *, is_news: bool) -> None:
        super().__init__(
            f"drive {number} has not answered for {deadline_s:g} s",
            next_step="look at the kernel's log (dmesg): nothing is saved there until the drive answers or is given up",
        )
        self.is_news = is_news


class _Command(Generic[Answer]):
    """Under way, or over."""

    def __init__(self, do: Callable[[], Answer]) -> None:
        self._do = do
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self.is_late = False
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self._answer = self._do()
        except BaseException as error:
            self._error = error

    def answer(self) -> Answer:
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]  # it is what the command has returned


class DriveAnswers:
    """Of drive ``number`` of a pool. ``answers_again``: is told, on a thread of its own, that a late answer came."""

    def __init__(self, number: int, deadline_s: float, answers_again: Callable[[], None]) -> None:
        self._number, self._deadline_s, self._answers_again = number, deadline_s, answers_again
        self._lock = threading.Lock()
        self._owed: _Command[Any] | None = None

    @property
    def is_late(self) -> bool:
        """Is there a command that nobody waits for any more?"""
        with self._lock:
            return self._owed is not None and self._owed.is_late

    def check(self) -> None:
        """Raises :class:`HangingDriveError` while an answer is late."""
        if self.is_late:
            raise HangingDriveError(self._number, self._deadline_s, is_news=False)

    def ask(self, do: Callable[[], Answer]) -> Answer:
        """What ``do`` returns or raises. Raises :class:`HangingDriveError` when that takes longer than the deadline,
        and at once while the answer to another is owed."""
        command = _Command(do)
        with self._lock:
            if self._owed is not None:
                raise HangingDriveError(self._number, self._deadline_s, is_news=False)
            self._owed = command
        name = f"meshfusion-drive-{self._number}"
        try:
            threading.Thread(target=self._run, args=(command,), name=name, daemon=True).start()
        except BaseException:
            with self._lock:
                self._owed = None
            raise
        if not command.over.wait(self._deadline_s):
            with self._lock:
                command.is_late = not command.over.is_set()
            if command.is_late:
                raise HangingDriveError(self._number, self._deadline_s, is_news=True)
        return command.answer()

    def _run(self, command: _Command[Answer]) -> None:
        command.run()
        with self._lock:
            self._owed = None
            command.over.set()
        if command.is_late:
            self._answers_again()


class PoolAnswers:
    """Of a pool's drives, by their numbers. ``answers_again``: is told of a drive whose late answer came, on a thread
    of its own."""

    def __init__(self, deadline_s: float, answers_again: Callable[[int], None]) -> None:
        self._deadline_s, self._answers_again = deadline_s, answers_again
        self._drives: dict[int, DriveAnswers] = {}

    def of(self, number: int) -> DriveAnswers:
        """The same one for all lives of a drive, and files that it is reached by."""
        if number not in self._drives:
            again = partial(self._answers_again, number)
            self._drives[number] = DriveAnswers(number, self._deadline_s, again)
        return self._drives[number]

    @property
    def late(self) -> frozenset[int]:
        """Drives that have not answered a command in time. What it was may happen yet."""
        return frozenset(number for number, answers in tuple(self._drives.items()) if answers.is_late)

    def left(self, number: int) -> None:
        """It is none of the pool's any more; who removes it has seen to it that it owes nothing."""
        self._drives.pop(number, None)


class AnsweringMedium:
    """A :class:`~meshfusion.dpu.pool_medium.BlockMedium` each of whose commands is answered in time, or raises
    :class:`HangingDriveError`; what then lies there is unknown."""

    def __init__(self, medium: BlockMedium, answers: DriveAnswers) -> None:
        self._medium, self._answers = medium, answers

    def read_blocks(self, lba: int, lba_count: int) -> bytes:
        return self._answers.ask(lambda: self._medium.read_blocks(lba, lba_count))

    def write_blocks(self, lba: int, data: bytes) -> None:
        self._answers.ask(lambda: self._medium.write_blocks(lba, data))

    def flush(self) -> None:
        self._answers.ask(self._medium.flush)

    def deallocate(self, lba: int, lba_count: int) -> bool:
        return self._answers.ask(lambda: self._medium.deallocate(lba, lba_count))

    @property
    def deallocated_reads_zeros(self) -> bool:
        return self._medium.deallocated_reads_zeros
