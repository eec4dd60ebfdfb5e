"""The host's end of a line of frames: to the agent itself, or to the keeper of a guest in the background."""

from __future__ import annotations

import select
import socket
import time
from collections import deque

from meshfusion.tools.lab.guest_agent.frames import CHUNK_BYTES, Frame, FrameDecoder, FrameError, encode_frame


class LineClosed(Exception):
    """The other side is gone."""


class LineTimeout(Exception):
    """The deadline passed."""


class Line:
    """Deadlines are of the monotonic clock, in seconds."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = FrameDecoder()
        self._received: deque[Frame] = deque()

    @property
    def connection(self) -> socket.socket:
        return self._socket

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: Frame, deadline: float) -> None:
        """Takes in what arrives meanwhile: the other side may wait for that before it reads on.

        Raises LineClosed, LineTimeout.
        """
        data = memoryview(encode_frame(frame))
        while data:
            readable, writable, _ = select.select([self._socket], [self._socket], [], _left_s(deadline))
            if readable:
                self._take_in()
            if writable:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    continue
                except OSError as e:
                    raise LineClosed from e

    def receive(self, deadline: float) -> Frame:
        """The next frame. Raises LineClosed, LineTimeout."""
        while not self._received:
            select.select([self._socket], [], [], _left_s(deadline))
            self._take_in()
        return self._received.popleft()

    def receive_nowait(self) -> list[Frame]:
        """The frames that are there. Raises LineClosed once there are none and none will come."""
        if not self._received:
            self._take_in()
        frames = list(self._received)
        self._received.clear()
        return frames

    def _take_in(self) -> None:
        try:
            data = self._socket.recv(8 * CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            raise LineClosed from e
        if not data:
            raise LineClosed
        try:
            self._received.extend(self._decoder.feed(data))
        except FrameError as e:
            raise LineClosed(str(e)) from e


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise LineTimeout
    return left
