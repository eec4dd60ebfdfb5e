"""TLS between a real server and real clients, with a CA of the test's own."""

from __future__ import annotations

import logging
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.running_server import RunningServer
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.identity import CallerIdentity
from meshfusion.dpu.api.security.principal import Principal, PrincipalKind
from meshfusion.dpu.api.security.roles import ALL_ROLES
from meshfusion.dpu.api.security.server_tls import ServerTls, ServerTlsFiles
from meshfusion.dpu.api.server import serve
from meshfusion.jbof.errors import ConfigError, PermissionDeniedError, ServiceUnavailableError
from tests.dpu.api.fake_service import FakeChunkService, make_chunk
from tests.dpu.security.authority import DAY, Authority, client_of, replace, server_files

DEADLINE_S = 5.0
DAY_HALF = DAY / 2


def known(*names: str) -> CallerIdentity:
    return CallerIdentity({name: Principal(PrincipalKind.CERTIFICATE, name, ALL_ROLES, "default") for name in names})


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def serving(
    files: ServerTlsFiles, service: FakeChunkService | None = None, identity: CallerIdentity | None = None, **more: Any
) -> Iterator[RunningServer]:
    guard = Guard(identity or known("engine-1"))
    server = serve(service or FakeChunkService(), "127.0.0.1:0", guard=guard, tls=ServerTls(files), **more)
    try:
        yield server
    finally:
        server.stop(0.0)


@contextmanager
def calling(server: RunningServer, security: ClientSecurity) -> Iterator[GrpcChunkService]:
    client = GrpcChunkService(server.address, security)
    try:
        yield client
    finally:
        client.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "did not happen in time"
        time.sleep(0.05)


def answers(server: RunningServer, security: ClientSecurity) -> bool:
    with calling(server, security) as client:
        try:
            client.status(deadline_s=DEADLINE_S)
        except ServiceUnavailableError:
            return False
        return True


def test_both_sides_prove_themselves(ca: Authority) -> None:
    with serving(server_files(ca, ca)) as server:
        assert answers(server, client_of(ca, ca.issue("engine-1")))


def test_an_alternative_name_is_a_subject_too(ca: Authority) -> None:
    uri = "spiffe://cluster/engine"
    with serving(server_files(ca, ca), identity=known(uri)) as server:
        assert answers(server, client_of(ca, ca.issue("whoever", sans=(uri,))))


def test_who_shows_no_certificate_is_kept_out(ca: Authority) -> None:
    with serving(server_files(ca, ca)) as server, calling(server, client_of(ca)) as client:
        with pytest.raises(ServiceUnavailableError, match="cannot be reached") as caught:
            client.status(deadline_s=DEADLINE_S)
        assert "client_ca" in caught.value.next_step


def test_a_certificate_of_another_ca_is_kept_out(ca: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with serving(server_files(ca, ca)) as server:
        assert not answers(server, client_of(ca, other.issue("engine-1")))


def test_a_server_of_another_ca_is_not_believed(ca: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    service = FakeChunkService()
    with serving(server_files(ca, ca), service) as server:
        assert not answers(server, client_of(other, ca.issue("engine-1")))
    assert service.calls == []


def test_the_name_of_the_server_counts(ca: Authority) -> None:
    files = ServerTlsFiles(*ca.issue("server", sans=("pool.example",)), ca.path)
    pair = ca.issue("engine-1")
    with serving(files) as server:
        assert not answers(server, client_of(ca, pair))
        assert answers(server, ClientSecurity(ca.path, *pair, server_name="pool.example"))


def test_plain_text_is_not_answered(ca: Authority) -> None:
    with serving(server_files(ca, ca)) as server, grpc.insecure_channel(server.address) as channel:
        call: Any = channel.unary_unary("/meshfusion.v1.ChunkService/Status")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("size_bytes", [1, 100, 100_000])
def test_what_is_no_tls_at_all_disturbs_nobody(ca: Authority, size_bytes: int) -> None:
    rng = random.Random(size_bytes)
    with serving(server_files(ca, ca)) as server, calling(server, client_of(ca, ca.issue("engine-1"))) as client:
        client.status(deadline_s=DEADLINE_S)
        host, _, port = server.address.rpartition(":")
        for start in (b"", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as rude, suppress(OSError):
                rude.sendall(start + rng.randbytes(size_bytes))
                rude.shutdown(socket.SHUT_WR)
                rude.recv(1)
        client.status(deadline_s=DEADLINE_S)
    with serving(server_files(ca, ca)) as server:
        assert answers(server, client_of(ca, ca.issue("engine-1")))


def test_a_certificate_that_nobody_is_known_by_is_denied(ca: Authority) -> None:
    with (
        serving(server_files(ca, ca)) as server,
        calling(server, client_of(ca, ca.issue("stranger"))) as client,
        pytest.raises(PermissionDeniedError, match="stranger") as caught,
    ):
        client.status(deadline_s=DEADLINE_S)
    assert "access" in caught.value.next_step
    assert isinstance(caught.value.__cause__, grpc.Call)
    assert caught.value.__cause__.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_certificate_of_two_callers_is_denied(ca: Authority) -> None:
    with (
        serving(server_files(ca, ca), identity=known("a", "b.example")) as server,
        calling(server, client_of(ca, ca.issue("a", sans=("b.example",)))) as client,
        pytest.raises(PermissionDeniedError, match="several callers"),
    ):
        client.status(deadline_s=DEADLINE_S)


def test_other_machines_are_served_only_when_they_say_who_they_are(ca: Authority) -> None:
    for guard, tls in ((Guard(known("a")), None), (None, ServerTls(server_files(ca, ca))), (None, None)):
        with pytest.raises(ConfigError, match="not a loopback address") as caught:
            serve(FakeChunkService(), "0.0.0.0:0", guard=guard, tls=tls)
        assert "tls" in caught.value.next_step
    server = serve(FakeChunkService(), "0.0.0.0:0", guard=Guard(known("engine-1")), tls=ServerTls(server_files(ca, ca)))
    port = server.address.rpartition(":")[2]
    client = GrpcChunkService(f"127.0.0.1:{port}", client_of(ca, ca.issue("engine-1")))
    client.status(deadline_s=DEADLINE_S)
    client.close()
    server.stop(0.0)


def test_openssl_is_an_independent_peer(ca: Authority) -> None:
    openssl = shutil.which("openssl")
    assert openssl, "on every Debian and Ubuntu with Python's own tests"
    pair = ca.issue("engine-1")
    with serving(server_files(ca, ca)) as server:
        command = [openssl, "s_client", "-connect", server.address, "-CAfile", str(ca.path), "-alpn", "h2"]
        command += ["-verify_return_error", "-verify_hostname", "localhost"]
        shown = ["-cert", str(pair.certificate), "-key", str(pair.key)]
        result = subprocess.run([*command, *shown], input=b"", capture_output=True, timeout=30)
        assert b"Verify return code: 0 (ok)" in result.stdout
        assert b"ALPN protocol: h2" in result.stdout
        bare = subprocess.run([*command, "-tls1_2"], input=b"", capture_output=True, timeout=30)
        assert bare.returncode != 0, "the service asks for a certificate"
        old = subprocess.run([*command, *shown, "-tls1_1"], input=b"", capture_output=True, timeout=30)
        assert old.returncode != 0, "TLS 1.1 is refused"


# ---- rotation --------------------------------------------------------------------------------------------------------


def serial_of_server(server: RunningServer) -> str:
    """As an independent client is shown it; TLS 1.2 since there it comes before the client's is asked for."""
    command = ["openssl", "s_client", "-connect", server.address, "-tls1_2", "-showcerts"]
    found = subprocess.run(command, input=b"", capture_output=True, timeout=30).stdout
    shown = subprocess.run(["openssl", "x509", "-noout", "-serial"], input=found, capture_output=True, timeout=30)
    return shown.stdout.decode()


def test_a_new_certificate_is_served_without_an_end_of_any_call(ca: Authority) -> None:
    service = FakeChunkService((make_chunk(1),))
    security = client_of(ca, ca.issue("engine-1"))
    with serving(server_files(ca, ca), service) as server, calling(server, security) as client:
        client.status(deadline_s=DEADLINE_S)
        service.started.clear()
        service.delay_s = 2.0
        replies: list[object] = []
        running = threading.Thread(target=lambda: replies.append(client.status(deadline_s=DEADLINE_S)))
        running.start()
        assert service.started.wait(DEADLINE_S)
        service.delay_s = 0.0
        before = serial_of_server(server)
        assert before.startswith("serial=")
        ca.issue("server")
        assert serial_of_server(server) not in ("", before), "a new connection is shown the new one"
        client.status(deadline_s=DEADLINE_S)  # on the connection of before
        running.join()
        assert replies == [service.current_status]


def test_a_ca_is_exchanged_under_running_calls(ca: Authority, tmp_path: Path) -> None:
    """Old and new side by side, then the clients' certificates, then the old one goes: who has not changed is out."""
    old_client = ca.issue("engine-1")
    new_ca = Authority(tmp_path, "new")
    bundle, served = tmp_path / "bundle.pem", server_files(ca, None)
    bundle.write_bytes(ca.pem)
    files = ServerTlsFiles(served.certificate, served.key, bundle)
    late = client_of(ca, ca.issue("engine-1", file="late"))
    old_files = (old_client.certificate.read_bytes(), old_client.key.read_bytes())
    security = ClientSecurity(bundle, *old_client)
    failures: list[Exception] = []
    stop = threading.Event()
    with serving(files) as server, calling(server, security) as client, calling(server, late) as former:

        def keep_calling() -> None:
            while not stop.is_set():
                try:
                    client.status(deadline_s=DEADLINE_S)
                except Exception as error:
                    failures.append(error)
                time.sleep(0.01)

        thread = threading.Thread(target=keep_calling)
        thread.start()
        try:
            former.status(deadline_s=DEADLINE_S)
            replace(bundle, ca.pem + new_ca.pem)
            time.sleep(1.2)  # the client looks once in a second
            new_ca.issue("engine-1")
            new_ca.issue("server")
            new_client_files = (old_client.certificate.read_bytes(), old_client.key.read_bytes())
            assert new_client_files != old_files
            time.sleep(1.2)
            replace(bundle, new_ca.pem)
            time.sleep(1.2)
        finally:
            stop.set()
            thread.join()
        assert failures == []
        former.status(deadline_s=DEADLINE_S)  # its connection is of before
        assert not answers(server, ClientSecurity(new_ca.path, late.certificate, late.key)), "of a CA that is gone"
        assert answers(server, ClientSecurity(new_ca.path, *old_client))


def test_a_bad_new_certificate_is_told_once_and_not_used(ca: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files = server_files(ca, ca)
    security = client_of(ca, ca.issue("engine-1"))
    with serving(files) as server:
        before = serial_of_server(server)
        with caplog.at_level(logging.INFO, logger="meshfusion.security"):
            replace(files.certificate, ca.issue("server", file="expired", life=-DAY_HALF).certificate.read_bytes())
            for _ in range(3):
                assert answers(server, security)
            assert serial_of_server(server) == before
            told = [r for r in caplog.records if r.levelno == logging.ERROR]
            assert len(told) == 1
            assert "expired" in told[0].getMessage()
            replace(files.certificate, b"rubbish")
            assert answers(server, security)
            assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 2, "another change"
            ca.issue("server")
            assert answers(server, security)
            assert serial_of_server(server) not in ("", before)


def test_connections_are_made_anew_when_they_are_old(ca: Authority, tmp_path: Path) -> None:
    """What bounds how long a caller is served whose certificate would not be accepted any more."""
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(ca.pem)
    served = server_files(ca, None)
    with (
        serving(ServerTlsFiles(served.certificate, served.key, bundle), connection_age_s=1.0) as server,
        calling(server, client_of(ca, ca.issue("engine-1"))) as client,
    ):
        for _ in range(25):
            client.status(deadline_s=DEADLINE_S)  # none is lost when the connection is exchanged
            time.sleep(0.1)
        replace(bundle, Authority(tmp_path, "new").pem)

        def is_out() -> bool:
            try:
                client.status(deadline_s=DEADLINE_S)
            except ServiceUnavailableError:
                return True
            return False

        wait_until(is_out)


def test_a_call_under_way_ends_on_the_connection_that_newer_files_replace(ca: Authority) -> None:
    service = FakeChunkService()
    pair = ca.issue("engine-1")
    with serving(server_files(ca, ca), service) as server, calling(server, client_of(ca, pair)) as client:
        client.status(deadline_s=DEADLINE_S)
        service.started.clear()
        service.delay_s = 3.0
        replies: list[object] = []
        running = threading.Thread(target=lambda: replies.append(client.status(deadline_s=2 * DEADLINE_S)))
        running.start()
        assert service.started.wait(DEADLINE_S)
        service.delay_s = 0.0
        caller = client._caller
        first = caller._connection
        ca.issue("engine-1")
        time.sleep(1.1)
        client.status(deadline_s=DEADLINE_S)
        assert caller._connection is not first
        assert caller._retired == {first}
        assert replies == []
        running.join()
        assert replies == [service.current_status]
        assert caller._retired == set(), "and is closed then"
        client.status(deadline_s=DEADLINE_S)


def test_a_restarted_service_with_another_ca_is_found_when_the_client_gets_it(ca: Authority, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(ca.pem)
    pair = ca.issue("engine-1")
    with serving(server_files(ca, ca)) as server:
        client = GrpcChunkService(server.address, ClientSecurity(trusted, *pair))
        client.status(deadline_s=DEADLINE_S)
        address = server.address
    new_ca = Authority(tmp_path, "new")
    tls = ServerTls(ServerTlsFiles(*new_ca.issue("server2"), ca.path))
    server = serve(FakeChunkService(), address, guard=Guard(known("engine-1")), tls=tls)
    with pytest.raises(ServiceUnavailableError):
        client.status(deadline_s=DEADLINE_S)
    replace(trusted, new_ca.pem)

    def is_answered() -> bool:
        try:
            client.status(deadline_s=DEADLINE_S)
        except ServiceUnavailableError:
            return False
        return True

    wait_until(is_answered)
    client.close()
    server.stop(0.0)
