"""Which controllers hold writes that are not durable yet. Pure.

A Flush through one controller is not taken to cover what another one completed: the specification speaks of what *the
controller* completed before, and a write cache may lie on the way. So there is one for every path that was written
over, and what a connection had completed when it was lost counts as not durable.
"""

from __future__ import annotations


class Unflushed:
    """A flush is that of all writes since the flush before it, so one saver at a time may use it."""

    def __init__(self) -> None:
        self._written: set[tuple[int, int]] = set()  # path, namespace
        self._lost: set[tuple[int, int]] = set()

    def wrote(self, path: int, nsid: int) -> None:
        """A write was completed there."""
        self._written.add((path, nsid))

    def lost(self, path: int) -> None:
        """The connection, with whatever its controller had not flushed."""
        gone = {pair for pair in self._written if pair[0] == path}
        self._written -= gone
        self._lost |= gone

    def paths(self, nsid: int) -> list[int]:
        """To flush now."""
        return sorted(path for path, written in self._written if written == nsid)

    def settle(self, nsid: int) -> list[int]:
        """Those were flushed, or whoever wrote is told that they were not. Returns paths that took writes with them:
        without any, and if every flush succeeded, all is durable."""
        lost = sorted(path for path, written in self._lost if written == nsid)
        self._written = {pair for pair in self._written if pair[1] != nsid}
        self._lost = {pair for pair in self._lost if pair[1] != nsid}
        return lost
