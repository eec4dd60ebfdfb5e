"""Flushing whatever was written, over each path that took it."""

from __future__ import annotations

import threading
import time

from meshfusion.host.path.flexpath.links import Links
from meshfusion.host.path.flexpath.unflushed import Unflushed
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.controller import not_connected


class Flushing:
    """Any thread may tell it what was written and lost; one saver at a time flushes."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._unflushed = Unflushed()
        self._lock = threading.Lock()

    def wrote(self, path: int, nsid: int) -> None:
        """A write was completed there."""
        with self._lock:
            self._unflushed.wrote(path, nsid)

    def lost(self, path: int) -> None:
        """The connection, with whatever its controller had not flushed."""
        with self._lock:
            self._unflushed.lost(path)

    def flush(self, nsid: int, *, timeout_s: float) -> None:
        """See :meth:`~meshfusion.host.path.flexpath.multipath.Multipath.flush`."""
        end_s = time.monotonic() + timeout_s
        error: MeshFusionError | None = None
        with self._lock:
            paths = self._unflushed.paths(nsid)
        for path in paths:
            initiator = self._links.initiator(path)
            try:
                if initiator is None:
                    raise not_connected(self._links.name(path))
                initiator.flush(nsid, timeout_s=max(0.001, end_s - time.monotonic()))
            except MeshFusionError as raised:
                error = error or raised
        with self._lock:
            lost = self._unflushed.settle(nsid)
        if error is not None:
            raise error
        if lost:
            names = ", ".join(map(self._links.name, lost))
            raise MediaError(
                f"the connection of {names} was lost before what was written over it was flushed",
                next_step="Nothing: what was written is not used. See why the connection was lost.",
            )
