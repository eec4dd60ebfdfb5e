"""The frames between host and guest on their one serial line: a codec without I/O. Numbers are little-endian. ::

offset  size  field
     0     2  magic b"LF": bytes that are no frame are seen at once
     2     1  kind
     3     4  session: u32, which command this is about; 0 is the guest itself
     7     4  payload_bytes: u32, at most MAX_PAYLOAD_BYTES
    11     n  payload
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Final

MAX_PAYLOAD_BYTES: Final = 1 << 20
CHUNK_BYTES: Final = 16 << 10
"""How much output one frame carries at most: small enough that sessions take turns."""

_MAGIC: Final = b"LF"
_HEADER: Final = struct.Struct("<2sBII")
_SIZE: Final = struct.Struct("<HH")


class FrameError(Exception):
    """The peer sent something that is no frame."""


class Kind(enum.IntEnum):
    READY = 1
    """Guest: the agent runs. The payload is the kernel's release."""
    RUN = 2
    """Host: start a command. The payload is a :class:`Request`."""
    INPUT = 3
    """Host: bytes typed at the session's terminal."""
    RESIZE = 4
    """Host: the terminal's rows and columns, u16 each."""
    KILL = 5
    """Host: end the command and all its processes."""
    OUTPUT = 6
    """Guest: what the command wrote to stdout, or to its terminal."""
    ERRORS = 7
    """Guest: what it wrote to stderr."""
    EXIT = 8
    """Guest: it ended. The payload is its exit code in decimal, 128 + n for signal n."""
    HALT = 9
    """Host: power off."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    session: int = 0
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Request:
    """A command to run. ``environment`` is all that it gets. ``terminal``: rows and columns, for an interactive one."""

    command: tuple[str, ...]
    directory: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    terminal: tuple[int, int] | None = None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Request:
        """Raises FrameError."""
        try:
            body = json.loads(payload)
            terminal = body["terminal"]
            return cls(
                command=tuple(body["command"]),
                directory=body["directory"],
                environment=dict(body["environment"]),
                terminal=None if terminal is None else (int(terminal[0]), int(terminal[1])),
            )
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise FrameError(f"not a request: {e!r}") from e


def encode_frame(frame: Frame) -> bytes:
    assert len(frame.payload) <= MAX_PAYLOAD_BYTES, "the sender cuts its payload"
    return _HEADER.pack(_MAGIC, frame.kind, frame.session, len(frame.payload)) + frame.payload


def encode_size(rows: int, columns: int) -> bytes:
    return _SIZE.pack(min(rows, 0xFFFF), min(columns, 0xFFFF))


def decode_size(payload: bytes) -> tuple[int, int]:
    """Raises FrameError."""
    if len(payload) != _SIZE.size:
        raise FrameError(f"a terminal's size is {_SIZE.size} bytes, not {len(payload)}")
    rows, columns = _SIZE.unpack(payload)
    return rows, columns


class FrameDecoder:
    """Takes bytes as they come, gives the frames that are complete."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Raises FrameError at the first byte that does not belong to a frame."""
        self._pending += data
        while (frame := self._take()) is not None:
            yield frame

    def _take(self) -> Frame | None:
        start = bytes(self._pending[: _HEADER.size])
        if start[:2] != _MAGIC[: len(start)]:
            raise FrameError(f"the line is out of step: {start!r}")
        if len(start) < _HEADER.size:
            return None
        _, kind, session, payload_bytes = _HEADER.unpack(start)
        if payload_bytes > MAX_PAYLOAD_BYTES or kind not in set(Kind):
            raise FrameError(f"frame of kind {kind} with {payload_bytes} bytes")
        end = _HEADER.size + payload_bytes
        if len(self._pending) < end:
            return None
        payload = bytes(self._pending[_HEADER.size : end])
        del self._pending[:end]
        return Frame(Kind(kind), session, payload)
