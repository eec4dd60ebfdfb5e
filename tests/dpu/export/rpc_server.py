"""A JSON-RPC server at a UNIX socket that answers as it is told, for the client's sake."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[dict[str, Any]], "bytes | list[bytes | float]"]
"""From a request to what is sent: bytes, or pieces with pauses in seconds between them. No bytes: it hangs up."""


class RpcServer:
    """Answers each request with the next answer, the last one again and again."""

    def __init__(self, path: Path, *answers: Answer) -> None:
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self._answers = list(answers)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        text = ""
        with connection:
            while data := _received(connection):
                text += data.decode()
                try:
                    request = json.loads(text)
                except ValueError:
                    continue
                text = ""
                self.requests.append(request)
                answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
                if not self._send(connection, answer(request)):
                    return

    def _send(self, connection: socket.socket, pieces: bytes | list[bytes | float]) -> bool:
        for piece in [pieces] if isinstance(pieces, bytes) else pieces:
            if isinstance(piece, float):
                time.sleep(piece)
                continue
            if not piece:
                return False
            try:
                connection.sendall(piece)
            except OSError:
                return False
        return True


def _received(connection: socket.socket) -> bytes:
    """None when the other side is gone, in whatever way."""
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def result(value: object, *, id_offset: int = 0) -> Answer:
    def answer(request: dict[str, Any]) -> bytes:
        return json.dumps({"jsonrpc": "2.0", "id": request["id"] + id_offset, "result": value}).encode()

    return answer


def error(value: object) -> Answer:
    return lambda request: json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": value}).encode()


def pieces(*parts: bytes | float) -> Answer:
    return lambda _request: list(parts)
