"""A socket that keeps one wall-clock deadline, for a client that would count processor time.

The client of the ``spdk`` package (26.9) sets its socket's timeout to what is left of its own budget, which it
measures with ``time.process_time``: while it waits nothing of that is used up, and a peer that sends a byte now and
then holds it for ever. It also decodes each piece it receives on its own, and loses one that ends inside a character.
"""

from __future__ import annotations

import codecs
import socket
import time
from pathlib import Path

_RECEIVE_BYTES = 65_536


class DeadlineSocket:
    """A connected UNIX stream socket. Every call ends by the deadline with :class:`TimeoutError`."""

    def __init__(self, path: Path, deadline_s: float) -> None:
        """``deadline_s``: on the clock of :func:`time.monotonic`. Raises :class:`OSError`."""
        self._deadline_s = deadline_s
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(self._left_s())
            self._socket.connect(str(path))
        except BaseException:
            self._socket.close()
            raise

    def set_deadline(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def settimeout(self, _timeout_s: float) -> None:
        """Called by the client, whose reckoning is not heeded."""

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(self._left_s())
        self._socket.sendall(data)  # its timeout bounds the whole call

    def recv(self, _length_bytes: int) -> bytes:
        """Only whole characters; nothing at the end of the stream. UnicodeDecodeError for what is no UTF-8."""
        while True:
            self._socket.settimeout(self._left_s())
            data = self._socket.recv(_RECEIVE_BYTES)
            text = self._decoder.decode(data, final=not data)
            if text or not data:
                return text.encode()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("deadline passed")
        return left_s
