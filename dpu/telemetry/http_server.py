"""A small HTTP server for monitors: GET and HEAD of a few pages, one request a connection, everything bounded.

There is no authentication: whoever reaches it may read all pages. At a loopback address, requests that name another
host are refused: a page of somebody's in a browser on this machine could otherwise read them, under a name of its own
that it lets point here.
"""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from meshfusion.dpu.api.address import TcpAddress, UnixAddress
from meshfusion.dpu.api.listen import check_free
from meshfusion.dpu.telemetry.pages import Page, Pages
from meshfusion.jbof.errors import ConfigError

logger = logging.getLogger("meshfusion.http")

MAX_CONNECTIONS: Final = 16
MAX_REQUEST_BYTES: Final = 16 * 1024
CONNECTION_S: Final = 10.0
"""For a whole request and, once more, for its answer: a client that sends or takes nothing holds a thread no longer."""


def check_telemetry_address(address: UnixAddress | TcpAddress) -> None:
    """As :func:`~meshfusion.dpu.api.listen.check_free`, whose ConfigError names ``listen``."""
    try:
        check_free(address)
    except ConfigError as error:
        raise ConfigError(f"telemetry.{error.message}", next_step=error.next_step) from error


class TelemetryServer:
    """Serves from :meth:`start` to :meth:`close`. ``address``: with the port that it has got."""

    def __init__(
        self,
        address: UnixAddress | TcpAddress,
        pages: Pages,
        *,
        max_connections: int = MAX_CONNECTIONS,
        connection_s: float = CONNECTION_S,
    ) -> None:
        """Raises :class:`~meshfusion.jbof.errors.ConfigError` when it cannot listen there."""
        self._server = _bound(address, _Serving(pages, address, max_connections, connection_s))
        self._socket_path = address.path if isinstance(address, UnixAddress) else None
        port = 0 if isinstance(address, UnixAddress) else int(self._server.server_address[1])
        self.address = address if isinstance(address, UnixAddress) else TcpAddress(address.host, port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="meshfusion-http", daemon=True)

    def start(self) -> None:
        self._thread.start()
        logger.info("telemetry on %s", self.address)

    def close(self) -> None:
        """Requests under way end by themselves; their threads hold nothing of the pool's."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)


_MISDIRECTED: Final = Page(
    421,
    "text/plain; charset=utf-8",
    b"this is served as localhost, 127.0.0.1, [::1] or the host of telemetry.listen only\n",
)


_NOT_ALLOWED: Final = Page(
    405, "text/plain; charset=utf-8", b"these pages are for GET and HEAD only\n", (("Allow", "GET, HEAD"),)
)


def is_served_host(host: str, address: TcpAddress) -> bool:
    """Does a request's ``Host`` name the loopback ``address`` that it came to, under any port?"""
    name = re.sub(r":[0-9]*$", "", host.strip()).lower()
    return name.removeprefix("[").removesuffix("]") in {"localhost", "127.0.0.1", "::1", address.host.lower()}


class _Serving:
    def __init__(
        self, pages: Pages, address: UnixAddress | TcpAddress, max_connections: int, connection_s: float
    ) -> None:
        self.pages = pages
        self._loopback = address if isinstance(address, TcpAddress) and address.is_loopback else None
        self.connection_s = connection_s
        self.free = threading.BoundedSemaphore(max_connections)

    def serves(self, hosts: Sequence[str]) -> bool:
        """``hosts``: as a request names them; browsers always do. At other addresses any name may be the right one."""
        return self._loopback is None or all(is_served_host(host, self._loopback) for host in hosts)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: socket.AddressFamily, at: Any, serving: _Serving) -> None:
        self.address_family = family
        self.serving = serving
        super().__init__(at, _Handler)

    def server_bind(self) -> None:
        """Not as the parent class, which asks a name server for its own name, and knows no sockets with paths."""
        if self.address_family != socket.AF_UNIX:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.serving.free.acquire(blocking=False):
            self.shutdown_request(request)  # a scraper tries again; nobody waits for the slowest
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.serving.free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.serving.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for telemetry failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "meshfusion"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._received = _BoundedReceiver(self.connection, time.monotonic() + self.server.serving.connection_s)
        self.rfile = io.BufferedReader(self._received)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _refuse_method(self) -> None:
        """Of HTTP's methods, none but GET and HEAD is for any page; what else somebody thinks of is not implemented."""
        self._send(_NOT_ALLOWED, with_body=True)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def _answer(self, *, with_body: bool) -> None:
        if self._received.is_cut:
            self.send_error(431)
            return
        if not self.server.serving.serves(self.headers.get_all("Host") or []):
            self._send(_MISDIRECTED, with_body=with_body)
            return
        page_of = self.server.serving.pages.get(self.path.partition("?")[0])
        if page_of is None:
            page = Page(404, "text/plain; charset=utf-8", "\n".join(sorted(self.server.serving.pages)).encode() + b"\n")
        else:
            try:
                page = page_of()
            except Exception:
                logger.exception("the page %s could not be made: a defect of the service", self.path)
                page = Page(500, "text/plain; charset=utf-8", b"this page could not be made: see the service's log\n")
        self._send(page, with_body=with_body)

    def _send(self, page: Page, *, with_body: bool) -> None:
        # Of the whole answer: sendall counts from its beginning.
        self.connection.settimeout(self.server.serving.connection_s)
        self.send_response(page.code)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in page.headers:
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def address_string(self) -> str:
        return ""


class _BoundedReceiver(io.RawIOBase):
    """A request, which ends after :data:`MAX_REQUEST_BYTES` and at ``end_s``, however slowly it trickles in."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._connection = connection
        self._end_s = end_s
        self._left_bytes = MAX_REQUEST_BYTES

    @property
    def is_cut(self) -> bool:
        return self._left_bytes == 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left_s)
        view = memoryview(buffer)[: self._left_bytes]
        count = self._connection.recv_into(view) if len(view) else 0
        self._left_bytes -= count
        return count


def _bound(address: UnixAddress | TcpAddress, serving: _Serving) -> _Server:
    try:
        if isinstance(address, UnixAddress):
            return _bound_unix(address, serving)
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, at = found[0]
        return _Server(family, at, serving)
    except OSError as error:
        raise ConfigError(
            f"telemetry.listen: cannot listen on {address}: {error.strerror or error}",
            next_step="Stop the other process (`ss -ltnp` names it) or choose another address.",
        ) from error


def _bound_unix(address: UnixAddress, serving: _Serving) -> _Server:
    check_telemetry_address(address)
    address.path.unlink(missing_ok=True)  # of a service that has died: nobody answers there
    old_mask = os.umask(0o177)
    try:
        return _Server(socket.AF_UNIX, str(address.path), serving)
    finally:
        os.umask(old_mask)
