"""The HTTP server for monitors, by clients that behave and clients that do not."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api.address import TcpAddress, UnixAddress
from meshfusion.dpu.telemetry.http_server import MAX_REQUEST_BYTES, TelemetryServer
from meshfusion.dpu.telemetry.pages import Page
from meshfusion.jbof.errors import ConfigError
from tests.dpu.telemetry.fakes import wait_until

CONNECTIONS, CONNECTION_S = 3, 0.6


def broken() -> Page:
    raise RuntimeError("a defect")


PAGES = {
    "/metrics": lambda: Page(200, "text/plain", b"x 1\n"),
    "/healthz": lambda: Page(503, "application/json", b"{}\n"),
    "/broken": broken,
    "/large": lambda: Page(200, "text/plain", b"y" * (32 << 20)),
}


def serving(address: TcpAddress | UnixAddress) -> TelemetryServer:
    server = TelemetryServer(address, PAGES, max_connections=CONNECTIONS, connection_s=CONNECTION_S)
    server.start()
    return server


@pytest.fixture
def server() -> Iterator[TelemetryServer]:
    server = serving(TcpAddress("127.0.0.1", 0))
    yield server
    server.close()


def port_of(server: TelemetryServer) -> int:
    assert isinstance(server.address, TcpAddress)
    return server.address.port


def ask(server: TelemetryServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=20.0)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def raw(server: TelemetryServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server)), timeout=20.0)


def received(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_pages(server: TelemetryServer) -> None:
    code, headers, body = ask(server, "/metrics")
    assert (code, headers["Content-Type"], body) == (200, "text/plain", b"x 1\n")
    assert ask(server, "/metrics?a=b")[2] == b"x 1\n"
    assert ask(server, "/healthz")[::2] == (503, b"{}\n")
    code, headers, body = ask(server, "/metrics", "HEAD")
    assert (code, headers["Content-Length"], body) == (200, "4", b"")


def test_unknown_paths_are_told_the_known_ones(server: TelemetryServer) -> None:
    code, _, body = ask(server, "/../etc/passwd")
    assert (code, body) == (404, b"/broken\n/healthz\n/large\n/metrics\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
@pytest.mark.parametrize("path", ["/metrics", "/none"])
def test_other_methods_are_not_allowed(server: TelemetryServer, method: str, path: str) -> None:
    """RFC 9110, 15.5.6: the answer names those that are."""
    code, headers, _ = ask(server, path, method)
    assert (code, headers["Allow"]) == (405, "GET, HEAD")


def test_what_is_no_method_is_not_implemented(server: TelemetryServer) -> None:
    assert ask(server, "/metrics", "BREW")[0] == 501


def test_a_defect_of_a_page_is_its_own(server: TelemetryServer) -> None:
    code, _, body = ask(server, "/broken")
    assert (code, body) == (500, b"this page could not be made: see the service's log\n")
    assert ask(server, "/metrics")[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metrics?" + b"x" * MAX_REQUEST_BYTES + b" HTTP/1.0\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\nX: " + b"x" * MAX_REQUEST_BYTES + b"\r\n\r\n",
    ],
)
def test_a_request_that_is_too_long_is_refused(server: TelemetryServer, request_bytes: bytes) -> None:
    with raw(server) as connection:
        connection.sendall(request_bytes)
        answer = received(connection)
    # The rest of what was sent lies unread when the connection ends, so that its answer may be lost.
    assert not answer or b"431" in answer
    assert b"x 1" not in answer


def test_the_longest_request_is_answered(server: TelemetryServer) -> None:
    head = b"GET /metrics HTTP/1.0\r\nX: "
    with raw(server) as connection:
        connection.sendall(head + b"x" * (MAX_REQUEST_BYTES - len(head) - 5) + b"\r\n\r\n")
        assert received(connection).endswith(b"x 1\n")


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HT"])
def test_one_that_sends_nothing_more_is_dropped(server: TelemetryServer, sent: bytes) -> None:
    begun_s = time.monotonic()
    with raw(server) as connection:
        connection.sendall(sent)
        assert received(connection) == b""
    assert CONNECTION_S * 0.9 <= time.monotonic() - begun_s < 6.0


def test_one_that_trickles_is_dropped(server: TelemetryServer) -> None:
    """Each byte in time, the whole never."""
    begun_s = time.monotonic()
    is_dropped = False
    with raw(server) as connection:
        while not is_dropped and time.monotonic() - begun_s < 15.0:
            try:
                connection.sendall(b"G")
            except OSError:  # a reset or a broken pipe
                is_dropped = True
            time.sleep(0.05)
    assert is_dropped


def test_one_that_takes_nothing_is_dropped(server: TelemetryServer) -> None:
    with raw(server) as connection:
        connection.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        time.sleep(CONNECTION_S * 2)
        assert len(received(connection)) < 32 << 20


def test_silent_ones_hold_only_so_many_threads_and_only_so_long() -> None:
    server = TelemetryServer(TcpAddress("127.0.0.1", 0), PAGES, max_connections=CONNECTIONS, connection_s=3.0)
    server.start()
    silent = [raw(server) for _ in range(CONNECTIONS)]
    begun_s = time.monotonic()
    with raw(server) as refused:
        assert received(refused) == b"", "it is closed"
    assert time.monotonic() - begun_s < 2.5, "at once, not when another one ends"
    assert not is_answered(server)
    wait_until(lambda: is_answered(server), "the silent ones are dropped")
    for connection in silent:
        connection.close()
    server.close()


def is_answered(server: TelemetryServer) -> bool:
    with raw(server) as connection, contextlib.suppress(OSError):
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return received(connection).endswith(b"x 1\n")
    return False


def test_many_one_after_another(server: TelemetryServer) -> None:
    assert {ask(server, "/metrics")[0] for _ in range(CONNECTIONS * 10)} == {200}


def test_unix_socket_is_the_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "t"
    server = serving(UnixAddress(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert received(connection).endswith(b"x 1\n")
    with pytest.raises(ConfigError, match=r"telemetry\.listen: another process"):
        serving(UnixAddress(path))
    server.close()
    assert not path.exists()


def test_a_socket_of_one_that_has_died_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    serving(UnixAddress(path)).close()


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        serving(UnixAddress(path))
    assert path.read_text() == "mine"


def test_a_port_that_is_taken(server: TelemetryServer) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.listen: cannot listen on 127\.0\.0\.1:\d+"):
        serving(TcpAddress("127.0.0.1", port_of(server)))


def test_closing_twice_or_unstarted(tmp_path: Path) -> None:
    TelemetryServer(UnixAddress(tmp_path / "t"), PAGES).close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("hosts", "is_served"),
    [
        ((), True),  # HTTP/1.0, as monitors that are a few lines of shell speak it
        (("localhost",), True),
        (("LOCALHOST:9477",), True),
        (("127.0.0.1:80",), True),
        (("[::1]:9477",), True),
        (("[::1]",), True),
        (("evil.example",), False),
        (("evil.example:9477",), False),
        (("localhost.evil.example",), False),
        (("127.0.0.1.evil.example",), False),
        (("localhost:x",), False),
        (("",), False),
        (("localhost", "evil.example"), False),
        (("192.0.2.1",), False),
        (("127.0.0.2",), False),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/none"])
def test_a_name_that_somebody_lets_point_here_is_refused(
    server: TelemetryServer, hosts: tuple[str, ...], is_served: bool, path: str
) -> None:
    """Otherwise the page of that name could read ours, in a browser on this machine."""
    with raw(server) as connection:
        named = "".join(f"Host: {host}\r\n" for host in hosts)
        connection.sendall(f"GET {path} HTTP/1.0\r\n{named}\r\n".encode())
        code = received(connection).split()[1]
    assert code == ((b"200" if path == "/metrics" else b"404") if is_served else b"421")


def test_the_host_it_was_told_to_listen_at_is_served() -> None:
    server = serving(TcpAddress("127.0.0.2", 0))
    with socket.create_connection(("127.0.0.2", port_of(server)), timeout=20.0) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.2:1\r\n\r\n")
        assert received(connection).endswith(b"x 1\n")
    server.close()


def test_where_others_may_reach_it_names_are_theirs() -> None:
    server = serving(TcpAddress("0.0.0.0", 0))
    with raw(server) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: storage-7.example\r\n\r\n")
        assert received(connection).endswith(b"x 1\n")
    server.close()
