"""Media that misbehave on demand, around a real file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.file import DataFile, DirectMode, create_data_file, open_data_file
from meshfusion.jbof.media.vectors import length_of


def open_new_file(path: Path, size_bytes: int = 4 << 20, *, kind: type[DataFile] = DataFile) -> Any:
    """A new file opened as ``kind`` (a subclass of DataFile)."""
    create_data_file(path, size_bytes)
    opened = open_data_file(path, writable=True, direct=DirectMode.AUTO)
    return kind(
        opened._fd,
        path,
        size_bytes=opened.size_bytes,
        writable=True,
        direct=opened.direct,
        reason=opened.direct_reason,
        alignment=opened.alignment,
        fabrics=opened.fabrics,
    )


class UnrulyFile(DataFile):
    """Counts; fails or waits when told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads: list[tuple[int, int]] = []  # (lba, bytes)
        self.flush_count = 0
        self.read_error: Exception | None = None
        self.write_error: dict[int, Exception] = {}  # by lba
        self.flush_error: Exception | None = None
        self.is_closed = False
        self.held_lbas: set[int] | None = None  # reads that wait for may_read; None: all
        self.may_read = threading.Event()
        self.may_read.set()
        self.may_write = threading.Event()
        self.may_write.set()
        self.waiting_readers = threading.Semaphore(0)  # only who really has to wait: an earlier transfer says nothing
        self.waiting_writers = threading.Semaphore(0)
        self.readers_done = threading.Semaphore(0)

    def read_into(self, lba: int, buffer: Any) -> None:
        with self._reading(lba, len(buffer)):
            super().read_into(lba, buffer)

    def read_vectors(self, lba: int, pieces: Sequence[memoryview]) -> None:
        with self._reading(lba, length_of(pieces)):
            super().read_vectors(lba, pieces)

    def write_from(self, lba: int, buffer: Any) -> None:
        self._begin_write(lba)
        super().write_from(lba, buffer)

    def write_vectors(self, lba: int, pieces: Sequence[memoryview]) -> None:
        self._begin_write(lba)
        super().write_vectors(lba, pieces)

    @contextlib.contextmanager
    def _reading(self, lba: int, length_bytes: int) -> Iterator[None]:
        self.reads.append((lba, length_bytes))
        try:
            if self.held_lbas is None or lba in self.held_lbas:
                if not self.may_read.is_set():
                    self.waiting_readers.release()
                assert self.may_read.wait(30)
            if self.read_error is not None:
                raise self.read_error
            yield
        finally:
            self.readers_done.release()

    def _begin_write(self, lba: int) -> None:
        if not self.may_write.is_set():
            self.waiting_writers.release()
        assert self.may_write.wait(30)
        if lba in self.write_error:
            raise self.write_error[lba]

    def flush(self) -> None:
        self.flush_count += 1
        if self.flush_error is not None:
            raise self.flush_error
        super().flush()

    def close(self) -> None:
        self.is_closed = True
        super().close()


def media_error(message: str) -> MediaError:
    return MediaError(message, next_step="replace the drive")


def flip_bit(path: Path, at_byte: int) -> None:
    """On the medium, behind everybody's back."""
    with path.open("r+b") as raw:
        raw.seek(at_byte)
        byte = raw.read(1)[0]
        raw.seek(at_byte)
        raw.write(bytes([byte ^ 0x80]))
        raw.flush()
        os.fsync(raw.fileno())
