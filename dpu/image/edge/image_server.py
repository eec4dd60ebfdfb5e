"""Offers a stream to one BMC over HTTP while it is pushed: at a path that cannot be guessed, counting what is taken.

The end of the BFB goes out in one piece with ``bf.cfg``, after all else has been taken
(:mod:`meshfusion.dpu.image.stream`).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from meshfusion.dpu.image.stream import Stream

_IDLE_S: Final = 330.0
"""As long as the BMC's rshim driver waits for a card that takes no bytes, and a little."""


class ImageServer:
    """Listens on ``address`` from its making until :meth:`close`."""

    def __init__(self, stream: Stream, address: str, port: int = 0) -> None:
        """Raises OSError when nothing can listen there."""
        self.taken_bytes = 0
        self._name = f"{secrets.token_urlsafe(16)}.bfb"
        self._server = _Server((address, port), _Handler)
        self._server.stream, self._server.name, self._server.count = stream, self._name, self._count
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="image-server")
        self._thread.start()

    @property
    def uri(self) -> str:
        """As BlueField's BMC wants it: address and path, and no scheme."""
        address, port = self._server.server_address[:2]
        return f"{address!s}:{port}//{self._name}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _count(self, total_bytes: int) -> None:
        self.taken_bytes = max(self.taken_bytes, total_bytes)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    stream: Stream
    name: str
    count: Callable[[int], None]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S

    def do_HEAD(self) -> None:
        self._begin()

    def do_GET(self) -> None:
        if not self._begin():
            return
        done_bytes = 0
        try:
            for piece in self.server.stream.body():
                self.wfile.write(piece)
                done_bytes += len(piece)
                self.server.count(done_bytes)
            self.wfile.write(self.server.stream.last_piece())
            self.server.count(self.server.stream.total_bytes)
        except (OSError, EOFError):
            self.close_connection = True  # the BMC went away, or the file did: its task tells

    def _begin(self) -> bool:
        if not secrets.compare_digest(self.path.lstrip("/").encode(), self.server.name.encode()):
            self.send_error(404)
            return False
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(self.server.stream.total_bytes))
        self.end_headers()
        return True

    def log_message(self, format: str, *args: object) -> None:
        """The path is a secret."""
