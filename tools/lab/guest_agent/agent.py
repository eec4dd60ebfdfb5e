"""The agent's loop: one line to the host, any number of commands, one thread."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from typing import Final

from meshfusion.tools.lab.guest_agent.frames import (
    CHUNK_BYTES,
    Frame,
    FrameDecoder,
    FrameError,
    Kind,
    Request,
    decode_size,
    encode_frame,
)
from meshfusion.tools.lab.guest_agent.sessions import NOT_FOUND_EXIT, NOT_STARTED_EXIT, Session, start_session

Handler = Callable[[], object]
MAX_LAST_READS: Final = 64
"""A pipe is empty after a few reads, unless a child of the ended command goes on writing."""


class Agent:
    """Serves the frames that come in on ``line``, an open serial line or socket, until it is told to halt."""

    def __init__(self, line: int, selector: selectors.BaseSelector | None = None) -> None:
        self._line = line
        self._decoder = FrameDecoder()
        self._selector = selectors.DefaultSelector() if selector is None else selector
        self._sessions: dict[int, Session] = {}
        self._halted = False

    def serve(self) -> None:
        """Returns after HALT or when the line is closed; commands that still run are killed. Raises FrameError."""
        self._selector.register(self._line, selectors.EVENT_READ, self._read_line)
        self._send(Frame(Kind.READY, payload=os.uname().release.encode()))
        while not self._halted:
            for key, _ in self._selector.select():
                self._handle(key)
        for session in self._sessions.values():
            session.kill()

    def _handle(self, key: selectors.SelectorKey) -> None:
        """Unless a handler before it closed what this event is of: its number may be another stream's by now."""
        if self._selector.get_map().get(key.fd) is key:
            handler: Handler = key.data
            handler()

    def _send(self, frame: Frame) -> None:
        data = memoryview(encode_frame(frame))
        while data:
            data = data[os.write(self._line, data) :]

    def _read_line(self) -> None:
        data = os.read(self._line, CHUNK_BYTES)
        if not data:
            self._halted = True
        for frame in self._decoder.feed(data):
            self._obey(frame)

    def _obey(self, frame: Frame) -> None:
        session = self._sessions.get(frame.session)
        if frame.kind is Kind.HALT:
            self._halted = True
        elif frame.kind is Kind.RUN:
            self._start(frame)
        elif session is None:
            pass  # it ended while this was on its way
        elif frame.kind is Kind.INPUT:
            self._type(session, frame.payload)
        elif frame.kind is Kind.RESIZE:
            session.resize(*decode_size(frame.payload))
        elif frame.kind is Kind.KILL:
            session.kill()
        else:
            raise FrameError(f"the host sent {frame.kind.name}")

    def _start(self, frame: Frame) -> None:
        request = Request.decode(frame.payload)
        try:
            session = start_session(frame.session, request)
        except OSError as e:
            code = NOT_FOUND_EXIT if isinstance(e, FileNotFoundError) else NOT_STARTED_EXIT
            text = f"{request.command[0]}: {e.strerror}: {e.filename}\n"
            self._send(Frame(Kind.ERRORS, frame.session, text.encode()))
            self._send(Frame(Kind.EXIT, frame.session, str(code).encode()))
            return
        self._sessions[frame.session] = session
        for fd in session.streams:
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._pass_on(session, fd))
        self._selector.register(session.pidfd, selectors.EVENT_READ, lambda: self._end(session))

    def _type(self, session: Session, data: bytes) -> None:
        """Input that the terminal does not take at once is tried again when it does."""
        left = session.type(data)
        if session.terminal is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
            self._selector.modify(session.terminal, events, lambda: self._serve_terminal(session))

    def _serve_terminal(self, session: Session) -> None:
        assert session.terminal is not None
        self._type(session, b"")
        self._pass_on(session, session.terminal)

    def _pass_on(self, session: Session, fd: int) -> bool:
        """Send what is there; was there something? After the command's end, what its children still say is dropped."""
        data = session.read(fd)
        if data and not session.ended:
            self._send(Frame(session.streams[fd], session.number, data))
        elif data == b"":
            self._forget(session, fd)
        return bool(data)

    def _forget(self, session: Session, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        del session.streams[fd]
        if fd == session.terminal:
            session.terminal = None

    def _end(self, session: Session) -> None:
        self._selector.unregister(session.pidfd)
        os.close(session.pidfd)
        code = session.exit_code()
        for fd in tuple(session.streams):
            for _ in range(MAX_LAST_READS):
                if not self._pass_on(session, fd) or fd not in session.streams:
                    break
        session.ended = True
        if session.terminal is not None:
            self._forget(session, session.terminal)
        del self._sessions[session.number]
        self._send(Frame(Kind.EXIT, session.number, str(code).encode()))
