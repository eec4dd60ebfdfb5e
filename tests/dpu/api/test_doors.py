"""Several addresses of one service: who is asked where, and that they come and go together."""

from __future__ import annotations

import logging
import socket
import stat
from pathlib import Path

import pytest

from meshfusion.dpu.access.audit_log import AuditLog
from meshfusion.dpu.access.tokens_file import TokensFile
from meshfusion.dpu.api.address import TcpAddress, UnixAddress
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.doors import doors_of, nearest
from meshfusion.dpu.api.drive_client import GrpcDriveAdmin
from meshfusion.dpu.api.drive_types import RemoveDriveRequest
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.identity import CallerIdentity
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.types import AttachRequest
from meshfusion.jbof.errors import ConfigError, ServiceUnavailableError, UnauthenticatedError
from tests.dpu.api.fake_service import FakeChunkService, make_chunk
from tests.dpu.security.authority import replace
from tests.dpu.security.test_guard import DEADLINE_S, TOKENS, FakeAdmin, attach_request, write_tokens

SOCKET, PORT = UnixAddress(Path("/run/s")), TcpAddress("127.0.0.1", 1)


def asking() -> Guard:
    return Guard(CallerIdentity(find_token=lambda token: None))


def test_beside_addresses_where_callers_are_asked_the_socket_is_its_users() -> None:
    guard = asking()
    others, own = doors_of((SOCKET, PORT), guard)
    assert (others.guard, others.addresses) == (guard, (PORT,))
    assert (own.guard.asks_who_calls, own.addresses) == (False, (SOCKET,))


@pytest.mark.parametrize("addresses", [(SOCKET,), (PORT,), (PORT, TcpAddress("::1", 2))])
def test_alone_they_are_all_asked(addresses: tuple[UnixAddress | TcpAddress, ...]) -> None:
    guard = asking()
    (door,) = doors_of(addresses, guard)
    assert (door.guard, door.addresses) == (guard, addresses)


def test_where_nobody_is_asked_there_is_one_door() -> None:
    (door,) = doors_of((PORT, SOCKET), Guard())
    assert door.addresses == (PORT, SOCKET)


def test_callers_on_the_machine_go_to_the_socket() -> None:
    assert nearest((PORT, SOCKET)) == SOCKET
    assert nearest((PORT,)) == PORT


def test_one_service_at_both(tmp_path: Path) -> None:
    """The same state, counters and record behind both; holders of either are their own."""
    service, admin, audit = FakeChunkService((make_chunk(1),)), FakeAdmin(), AuditLog(tmp_path / "audit.log")
    tokens = write_tokens(tmp_path / "tokens")
    guard = Guard(CallerIdentity(find_token=TokensFile(tokens).find), audit)
    server = serve(service, ("127.0.0.1:0", f"unix://{tmp_path}/s"), admin=admin, guard=guard)
    port, own = server.addresses
    assert own == server.address == f"unix://{tmp_path}/s"
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    replace(tmp_path / "token", TOKENS["engine-1"].encode(), mode=0o600)
    local, unknown = GrpcChunkService(own), GrpcChunkService(port)
    engine = GrpcChunkService(port, ClientSecurity(token_file=tmp_path / "token"))
    drives = GrpcDriveAdmin(own)
    try:
        assert local.status(deadline_s=DEADLINE_S) == service.current_status
        assert drives.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S) == 3
        assert '"principal": "local", "peer": "unix:' in (tmp_path / "audit.log").read_text()
        with pytest.raises(UnauthenticatedError):
            unknown.status(deadline_s=DEADLINE_S)
        engine.attach(attach_request(), deadline_s=DEADLINE_S)
        local.attach(attach_request(), deadline_s=DEADLINE_S)
        attached = [request for name, request in service.calls if name == "attach"]
        of_engine, of_local = (request.incarnation for request in attached if isinstance(request, AttachRequest))
        assert of_local == attach_request().incarnation
        assert of_engine.startswith(f"{of_local}-")
        assert dict(local.status(deadline_s=DEADLINE_S).counters)["calls_unauthenticated"] == 1, "counted for both"
    finally:
        for client in (local, unknown, engine, drives):
            client.close()
        server.stop(0.0)
        audit.close()
    assert not (tmp_path / "s").exists()
    with pytest.raises(ServiceUnavailableError):
        GrpcChunkService(port).status(deadline_s=1.0)


def test_all_of_them_or_none(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{number}"):
            serve(FakeChunkService(), (f"unix://{tmp_path}/s", f"127.0.0.1:{number}"))
        assert not (tmp_path / "s").exists()
    server = serve(FakeChunkService(), (f"unix://{tmp_path}/s", f"127.0.0.1:{number}"))
    server.stop(0.0)


def test_each_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="meshfusion.dpu.api.server"):
        server = serve(FakeChunkService(), (f"unix://{tmp_path}/s", "127.0.0.1:0"))
    server.stop(0.0)
    own, port = server.addresses
    assert [record.getMessage() for record in caplog.records] == [f"serving on {own}, mode 0600", f"serving on {port}"]
