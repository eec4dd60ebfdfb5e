"""Is the index fit to be read? A scan of all of it says so, before the pool serves or, of a large one, while it does.

A scan takes as long as the index is large, and a restart must not. LMDB itself survives kills and power cuts, so a scan
finds only what others did to the file. A service therefore waits for :data:`FIRST_LOOK_S` and then serves; damage that
is found later ends it. One that the damage killed first leaves a mark behind, and its successor waits for the scan.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from meshfusion.dpu.index import IndexTotals
from meshfusion.dpu.index_scan import IndexScan, scan_in_child
from meshfusion.jbof.errors import FormatError, MediaError

logger = logging.getLogger("meshfusion.index")

FIRST_LOOK_S: Final = 3.0
WHOLE_SCAN_S: Final = 3600.0
_MARK: Final = "index.unproven"


class IndexProof:
    """``totals``: of the whole scan; None when it was still under way."""

    def __init__(self, mark: Path, totals: IndexTotals | None, scan: IndexScan | None) -> None:
        self._mark = mark
        self.totals = totals
        self._scan = scan  # under way
        self._closing = False
        self._watcher: threading.Thread | None = None

    @classmethod
    def whole(cls, index: Path, pool_uuid: str, capacity_bytes: int) -> IndexProof:
        """Raises :class:`FormatError` for damage, or when it takes longer than :data:`WHOLE_SCAN_S`."""
        totals = scan_in_child(index, pool_uuid, capacity_bytes, deadline_s=WHOLE_SCAN_S)
        proof = cls(index.parent / _MARK, totals, None)
        proof._remove_mark()
        return proof

    @classmethod
    def begun(cls, index: Path, pool_uuid: str, capacity_bytes: int, *, first_look_s: float) -> IndexProof:
        """The scan may go on: :meth:`watch` it. Raises as :meth:`whole`, and MediaError."""
        if (index.parent / _MARK).exists():
            logger.warning("the last service ended before the index was looked through: that comes first")
            return cls.whole(index, pool_uuid, capacity_bytes)
        scan = IndexScan(index, pool_uuid, capacity_bytes)
        totals = scan.wait(first_look_s)
        if totals is not None:
            return cls(index.parent / _MARK, totals, None)
        proof = cls(index.parent / _MARK, None, scan)
        try:
            proof._leave_mark()
        except MediaError:
            scan.stop()
            raise
        scan.give_way()
        return proof

    @property
    def payload_bytes(self) -> int | None:
        return None if self.totals is None else self.totals.payload_bytes

    def watch(self, found: Callable[[IndexTotals], None], damaged: Callable[[FormatError], None]) -> None:
        """Tell how the scan ended, from a thread of its own; nothing when it had ended before."""
        if self._scan is not None:
            arguments = (self._scan, found, damaged)
            self._watcher = threading.Thread(target=self._wait, args=arguments, name="meshfusion-proof", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """This process ends as it should, so it was not the index that ended it. Idempotent."""
        self._closing = True
        if self._scan is not None:
            self._scan.stop()
            if self._watcher is not None:
                self._watcher.join()
            else:
                self._remove_mark()

    def _wait(
        self, scan: IndexScan, found: Callable[[IndexTotals], None], damaged: Callable[[FormatError], None]
    ) -> None:
        try:
            totals = scan.wait(None)
        except FormatError as error:
            if self._closing:
                self._remove_mark()
            else:
                damaged(error)  # and the mark stays
            return
        assert totals is not None
        self._remove_mark()
        logger.info("the index was looked through: %d chunks, %d damaged", totals.chunk_count, totals.damaged_count)
        found(totals)

    def _leave_mark(self) -> None:
        try:
            self._mark.touch()
        except OSError as error:
            raise MediaError(
                f"{self._mark} cannot be made: {error}", next_step="check space and permissions there"
            ) from error

    def _remove_mark(self) -> None:
        with contextlib.suppress(OSError):  # a read-only disk: the next start takes longer
            self._mark.unlink(missing_ok=True)
