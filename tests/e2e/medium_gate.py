"""Trouble for the data path of this process: reads and writes that are slow, stuck or failing; a full index."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

from meshfusion.dpu.index import Index
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.faults import DataFileError
from meshfusion.jbof.media.file import DataFile


class MediumGate:
    """Stands between loads and saves and the medium. Only their threads pass here, not those that read labels."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._ways = {"meshfusion-load": "", "meshfusion-save": ""}
        self._delay_s = 0.0
        self._read, self._write, self._apply = DataFile.read_into, DataFile.write_from, Index.apply
        gate = self

        def read_into(data: DataFile, lba: int, buffer: Any) -> None:
            gate._pass("reading", data)
            gate._read(data, lba, buffer)

        def write_from(data: DataFile, lba: int, buffer: Any) -> None:
            gate._pass("writing", data)
            gate._write(data, lba, buffer)

        DataFile.read_into = read_into  # type: ignore[method-assign, assignment]
        DataFile.write_from = write_from  # type: ignore[method-assign, assignment]

    def set(self, *, reads: str, writes: str, delay_s: float) -> None:
        self._delay_s = delay_s
        self._ways = {"meshfusion-load": reads, "meshfusion-save": writes}
        if "blocked" in (reads, writes):
            self._open.clear()
        else:
            self._open.set()

    def fail_index(self, failing: bool) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise MediaError("the index cannot be written: No space left on device (ENOSPC)", next_step="free space")

        Index.apply = full if failing else self._apply  # type: ignore[method-assign]

    def _pass(self, verb: str, data: DataFile) -> None:
        name = threading.current_thread().name
        way = next((way for prefix, way in self._ways.items() if name.startswith(prefix)), "")
        if way == "slow":
            time.sleep(self._delay_s)
        elif way == "blocked":
            self._open.wait()
        elif way == "failing":
            raise DataFileError.from_os_error(OSError(errno.EIO, "simulated"), f"{verb} failed", data.path)
        else:
            assert not way, way
