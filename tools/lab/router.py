"""Passes frames between the clients of a guest and its agent. One client, one command.

Whoever sends faster than its peer reads is not read until the peer has caught up: nothing is buffered without bound.
"""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from typing import Final

from meshfusion.tools.lab.guest_agent.frames import CHUNK_BYTES, Frame, FrameDecoder, FrameError, Kind, encode_frame

MAX_BACKLOG_BYTES: Final = 1 << 20
_FROM_CLIENTS: Final = frozenset((Kind.RUN, Kind.INPUT, Kind.RESIZE, Kind.KILL))


class Peer:
    """A connection with what is still to be sent on it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.decoder = FrameDecoder()
        self.backlog = bytearray()
        self.closed = False

    @property
    def full(self) -> bool:
        return len(self.backlog) > MAX_BACKLOG_BYTES

    def receive(self) -> list[Frame]:
        """What arrived. Marks the peer closed when it is gone or sends nonsense."""
        try:
            data = self.connection.recv(CHUNK_BYTES)
            self.closed = not data
            return list(self.decoder.feed(data))
        except BlockingIOError:
            return []
        except (OSError, FrameError):
            self.closed = True
            return []

    def send(self, frame: Frame) -> None:
        self.backlog += encode_frame(frame)
        self.flush()

    def flush(self) -> None:
        try:
            while self.backlog:
                del self.backlog[: self.connection.send(self.backlog)]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True


class Router:
    """``guest``: the line to a ready agent. ``listener``: a listening socket; each connection is one client."""

    def __init__(self, guest: socket.socket, listener: socket.socket, greeting: bytes) -> None:
        self._guest = Peer(guest)
        self._listener = listener
        self._greeting = greeting
        self._clients: dict[int, Peer] = {}
        self._next_session = 1
        self._halted = False

    def serve(self, deadline: float) -> str:
        """Until a client says HALT ("down"), the guest is gone ("lost") or the deadline passes ("expired")."""
        while not self._halted:
            if self._guest.closed:
                return "lost"
            if (left := deadline - time.monotonic()) <= 0:
                return "expired"
            self._pass_once(left)
        return "down"

    def close(self) -> None:
        """Let the clients know that there is no guest any more."""
        for client in self._clients.values():
            client.connection.close()

    def _pass_once(self, wait_s: float) -> None:
        # Made anew each time: interest depends on all backlogs, and there are few peers.
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            # A client that does not read stops the guest's line, so that its output waits in the guest.
            self._watch(selector, self._guest, 0, readable=not any(c.full for c in self._clients.values()))
            for session, client in self._clients.items():
                self._watch(selector, client, session, readable=not self._guest.full)
            ready = [(key.data, events) for key, events in selector.select(wait_s)]
        for session, events in ready:
            if session is None:
                self._accept()
            else:
                self._serve_peer(session, events)

    @staticmethod
    def _watch(selector: selectors.BaseSelector, peer: Peer, session: int, *, readable: bool) -> None:
        events = (selectors.EVENT_READ if readable else 0) | (selectors.EVENT_WRITE if peer.backlog else 0)
        if events:
            selector.register(peer.connection, events, session)

    def _accept(self) -> None:
        with suppress(OSError):
            client = Peer(self._listener.accept()[0])
            client.send(Frame(Kind.READY, payload=self._greeting))
            self._clients[self._next_session] = client
            self._next_session += 1

    def _serve_peer(self, session: int, events: int) -> None:
        peer = self._clients.get(session) if session else self._guest
        if peer is None:
            return
        if events & selectors.EVENT_WRITE:
            peer.flush()
        if events & selectors.EVENT_READ:
            for frame in peer.receive():
                if session:
                    self._from_client(session, frame)
                else:
                    self._from_guest(frame)
        if session and peer.closed:
            self._forget(session)

    def _from_client(self, session: int, frame: Frame) -> None:
        if frame.kind is Kind.HALT:
            self._halted = True
        elif frame.kind in _FROM_CLIENTS:
            self._guest.send(Frame(frame.kind, session, frame.payload))

    def _from_guest(self, frame: Frame) -> None:
        client = self._clients.get(frame.session)
        if client is not None:
            client.send(frame)

    def _forget(self, session: int) -> None:
        """Its command goes with it."""
        self._clients.pop(session).connection.close()
        self._guest.send(Frame(Kind.KILL, session))
