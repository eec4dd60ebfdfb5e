"""Making what a path's threads move bytes with, and letting several savers write a batch."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from meshfusion.host.path.medium import Medium, Saver
from meshfusion.host.path.shards import ShardWrite, ShardWritten
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.path")

Mover = TypeVar("Mover")


def made_or_why_not(make: Callable[[], Mover]) -> Mover | MeshFusionError:
    """What a thread moves bytes with, or why there is none yet: whoever asks is answered all the same."""
    try:
        return make()
    except MeshFusionError as error:
        return error
    except Exception as error:
        logger.exception("a thread of a path cannot begin")
        return MeshFusionError(f"a thread of a path cannot begin: {error!r}", next_step="report this as a bug")


class Savers:
    """The savers of one path, made when they are needed."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._savers: list[Saver] = []
        self._error = self._make()  # the first at once, so that a save does not wait for it

    def made(self, write_count: int) -> Sequence[Saver] | MeshFusionError:
        """Those for so many writes, at least one; or why there is none."""
        if not self._savers:
            self._error = self._make()
        while self._savers and len(self._savers) < min(write_count, self._medium.save_depth):
            if self._make() is not None:
                break  # fewer do the same, slower
        if not self._savers:
            assert self._error is not None
            return self._error
        return self._savers[:write_count]

    def _make(self) -> MeshFusionError | None:
        saver = made_or_why_not(self._medium.saver)
        if isinstance(saver, MeshFusionError):
            return saver
        self._savers.append(saver)
        return None

    def close(self) -> None:
        for saver in self._savers:
            saver.close()


def each_by_the_next(
    savers: Sequence[Saver], writes: Sequence[ShardWrite], save: Callable[[ShardWrite, Saver], ShardWritten]
) -> list[ShardWritten]:
    """What ``save`` says of each of ``writes``, which are begun in their order. A saver takes the next when it is free.

    Ends when all have ended. ``save`` raises nothing.
    """
    results: dict[int, ShardWritten] = {}
    waiting: queue.SimpleQueue[tuple[int, ShardWrite]] = queue.SimpleQueue()
    for numbered in enumerate(writes):
        waiting.put(numbered)

    def work(saver: Saver) -> None:
        while True:
            try:
                number, write = waiting.get_nowait()
            except queue.Empty:
                return
            results[number] = save(write, saver)

    beside = [
        threading.Thread(target=work, args=(saver,), name="meshfusion-save-beside", daemon=True) for saver in savers[1:]
    ]
    for thread in beside:  # on the processors of the thread that starts them
        thread.start()
    work(savers[0])
    for thread in beside:
        thread.join()
    return [results[number] for number in range(len(writes))]
