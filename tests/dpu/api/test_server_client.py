"""A real server and a real client over a unix socket."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.address import UnixAddress, parse_address
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.error_codec import DETAIL_METADATA_KEY
from meshfusion.dpu.api.limits import MalformedMessageError
from meshfusion.dpu.api.listen import check_free
from meshfusion.dpu.api.running_server import RunningServer
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof import errors
from tests.dpu.api import fake_service
from tests.dpu.api.fake_service import FakeChunkService, make_chunk

DEADLINE_S = 5.0


@pytest.fixture
def service() -> FakeChunkService:
    return FakeChunkService(tuple(make_chunk(number) for number in range(1, 6)))


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


@pytest.fixture
def server(service: FakeChunkService, address: str) -> Iterator[RunningServer]:
    running = serve(service, address)
    yield running
    running.stop(0.0)


@pytest.fixture
def client(server: RunningServer) -> Iterator[GrpcChunkService]:
    client = GrpcChunkService(server.address)
    yield client
    client.close()


def attach_request(**changes: Any) -> t.AttachRequest:
    fields: dict[str, Any] = {
        "incarnation": "ab" * 16,
        "engine_kind": "vllm",
        "engine_version": "0.32.0",
        "host": "box",
        "pid": 77,
        "identity": b"\x11" * 32,
        "rank_count": 2,
        "tenant": "acme",
        "handoff_token": "tok",
        **changes,
    }
    return t.AttachRequest(**fields)


def match_request(*keys: bytes) -> t.MatchRequest:
    windowed = t.GroupKeys(4, (b"w" * 32,) * len(keys), tuple(range(len(keys))))
    return t.MatchRequest("h-1", "req", 64, (t.GroupKeys(3, keys, (0,) * len(keys)), windowed))


def test_every_call_means_the_same_as_in_process(service: FakeChunkService, client: GrpcChunkService) -> None:
    chunk = make_chunk(2)
    size = t.ShardSize(0, 4096, 16)
    items = tuple(t.ReserveItem(bytes([n]) * 32, 0, 64 * n, 64, (size, size), copies=2) for n in range(4))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("attach", (attach_request(),)),
        ("match", (match_request(chunk.key, make_chunk(3).key, b"?" * 32),)),
        ("match", (match_request(b"?" * 32),)),
        ("release", (t.ReleaseRequest("h-1", ("lease-1", "lease-2")),)),
        ("reserve", (t.ReserveRequest("h-1", 3, items),)),
        (
            "commit",
            (
                t.CommitRequest(
                    "h-1", 3, tuple(t.CommitItem(g, ((b"d" * 8,) * 2,), bundle=7) for g in ("a", "grant-expired"))
                ),
            ),
        ),
        ("abort", (t.AbortRequest("h-1", 3, ("grant-0",)),)),
        ("heartbeat", (t.HeartbeatRequest("h-1", 3, ("l1", "l2")),)),
        ("status", ()),
        ("list_chunks", (t.ListRequest(limit=2),)),
        ("list_chunks", (t.ListRequest(after_key=make_chunk(4).key, limit=2, identity=b"\x11" * 32),)),
        ("get_chunk", (chunk.key,)),
        ("get_chunk", (b"?" * 32,)),
        ("drop", (t.DropRequest("h-1", chunk.key, chunk.shards[0].extent, "digest mismatch"),)),
        ("drop", (t.DropRequest("h-1", chunk.key, chunk.shards[0].extent, "digest mismatch"),)),
        ("detach", (t.DetachRequest("h-1"),)),
    ]
    twin = FakeChunkService(tuple(service.chunks.values()))
    for name, arguments in calls:
        reply = getattr(client, name)(*arguments, deadline_s=DEADLINE_S)
        assert reply == getattr(twin, name)(*arguments, deadline_s=DEADLINE_S), name
    assert service.calls == twin.calls
    assert {name for name, _ in calls} == {n for n in dir(t.ChunkService) if not n.startswith("_")} - {"close"}
    assert all(0 < deadline_s <= DEADLINE_S + 0.1 for deadline_s in service.deadlines_s)


def test_list_pages_to_the_end(client: GrpcChunkService) -> None:
    seen, after = [], b""
    while True:
        reply = client.list_chunks(t.ListRequest(after_key=after, limit=2), deadline_s=DEADLINE_S)
        seen += [int.from_bytes(c.key, "big") for c in reply.chunks]
        after = reply.next_after_key
        if not after:
            break
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.StaleHolderError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.ServiceUnavailableError, grpc.StatusCode.UNAVAILABLE),
        (errors.ServiceError, grpc.StatusCode.INVALID_ARGUMENT),
        (MalformedMessageError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
        (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.PoolBusyError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.FormatError, grpc.StatusCode.DATA_LOSS),
        (errors.MediaError, grpc.StatusCode.INTERNAL),
    ],
)
def test_errors_keep_class_message_and_next_step(
    service: FakeChunkService, client: GrpcChunkService, kind: type[errors.MeshFusionError], code: grpc.StatusCode
) -> None:
    service.failure = kind("tenant: 'é' is not served", next_step="Use tenant 'default'.")
    with pytest.raises(errors.MeshFusionError) as caught:
        client.attach(attach_request(), deadline_s=DEADLINE_S)
    assert type(caught.value) is kind
    assert caught.value.message == "tenant: 'é' is not served"
    assert caught.value.next_step == "Use tenant 'default'."
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.Call)
    assert cause.code() is code


def test_no_space_is_resource_exhausted(service: FakeChunkService, client: GrpcChunkService) -> None:
    service.failure = errors.MediaError("disk full", next_step="Free space.")
    service.failure.__cause__ = OSError(28, "No space left on device")
    with pytest.raises(errors.MediaError) as caught:
        client.status(deadline_s=DEADLINE_S)
    assert isinstance(caught.value.__cause__, grpc.Call)
    assert caught.value.__cause__.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_defect_of_the_service_is_hidden_but_logged(
    service: FakeChunkService, client: GrpcChunkService, caplog: pytest.LogCaptureFixture
) -> None:
    service.failure = ZeroDivisionError("secret detail")
    with pytest.raises(errors.ServiceError, match="Status failed inside the service") as caught:
        client.status(deadline_s=DEADLINE_S)
    assert "secret detail" not in str(caught.value)
    assert "secret detail" in caplog.text


def test_a_very_long_message_still_arrives(service: FakeChunkService, client: GrpcChunkService) -> None:
    service.failure = errors.StaleHolderError("ü" * 100_000, next_step="ß" * 100_000)
    with pytest.raises(errors.StaleHolderError, match=r"^ü{1000}\n"):
        client.status(deadline_s=DEADLINE_S)


def test_malformed_requests_are_invalid_arguments(service: FakeChunkService, server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call: Any = channel.unary_unary("/meshfusion.v1.ChunkService/Match")
        bad_key = pb.MatchRequest(
            holder_id="h", chunk_tokens=1, groups=[pb.GroupKeys(keys=[b"short"])]
        ).SerializeToString()
        for raw in (b"\xff\xff\xff", bad_key):
            with pytest.raises(grpc.RpcError) as caught:
                call(raw, timeout=DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            metadata: dict[str, Any] = dict(caught.value.trailing_metadata() or ())  # type: ignore[arg-type]
            assert pb.ErrorDetail.FromString(metadata[DETAIL_METADATA_KEY]).kind == "MalformedMessageError"
    assert service.calls == []


def test_values_the_wire_cannot_carry_are_refused_before_sending(
    service: FakeChunkService, client: GrpcChunkService
) -> None:
    with pytest.raises(MalformedMessageError, match="Attach"):
        client.attach(attach_request(pid=-1), deadline_s=DEADLINE_S)
    with pytest.raises(MalformedMessageError, match="Attach"):
        client.attach(attach_request(host="\ud800"), deadline_s=DEADLINE_S)
    assert service.calls == []


def test_a_call_unknown_to_the_server_is_unsupported(address: str, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    client = GrpcChunkService(address)
    with pytest.raises(errors.UnsupportedError, match="does not know the call Status"):
        client.status(deadline_s=DEADLINE_S)
    client.close()
    server.stop(0)


def test_deadline_is_kept_when_the_service_hangs(service: FakeChunkService, client: GrpcChunkService) -> None:
    client.status(deadline_s=DEADLINE_S)
    service.delay_s = 1.0
    began_s = time.monotonic()
    with pytest.raises(errors.ServiceUnavailableError, match=r"did not answer Status within 0\.05 s"):
        client.status(deadline_s=0.05)
    assert time.monotonic() - began_s < 0.5
    with pytest.raises(errors.ServiceUnavailableError):
        client.status(deadline_s=-1.0)


def test_saves_that_wait_for_a_drive_keep_no_lookup_waiting(
    service: FakeChunkService, client: GrpcChunkService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are threads."""
    may_go, waiting = threading.Event(), threading.Semaphore(0)

    def hang(request: object, *, deadline_s: float) -> t.ReserveReply:
        waiting.release()
        assert may_go.wait(30)
        return t.ReserveReply(())

    monkeypatch.setattr(service, "reserve", hang)
    holder_id = client.attach(attach_request(), deadline_s=DEADLINE_S).holder_id
    request = t.ReserveRequest(holder_id, 3, ())
    saves = [threading.Thread(target=client.reserve, args=(request,), kwargs={"deadline_s": 30.0}) for _ in range(64)]
    for save in saves:
        save.start()
    try:
        for _ in range(16):
            assert waiting.acquire(timeout=10)
        time.sleep(0.2)  # the others have come
        for _ in range(3):
            client.match(match_request(make_chunk(2).key), deadline_s=1.0)
            client.heartbeat(t.HeartbeatRequest(holder_id, 3, ()), deadline_s=1.0)
            client.status(deadline_s=1.0)
    finally:
        may_go.set()
    for save in saves:
        save.join(30)
        assert not save.is_alive()


def test_deadline_is_kept_when_nobody_accepts(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen(1)
        client = GrpcChunkService(f"unix://{tmp_path}/s")
        began_s = time.monotonic()
        with pytest.raises(errors.ServiceUnavailableError):
            client.status(deadline_s=0.1)
        assert time.monotonic() - began_s < 0.6
        client.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "did not happen in time"
        time.sleep(0.01)


def test_a_lease_nobody_waits_for_is_given_back(service: FakeChunkService, client: GrpcChunkService) -> None:
    client.attach(attach_request(), deadline_s=DEADLINE_S)
    service.delay_s = 0.3
    with pytest.raises(errors.ServiceUnavailableError):
        client.match(match_request(make_chunk(1).key), deadline_s=0.05)
    wait_until(lambda: ("release", t.ReleaseRequest("h-1", ("lease-1",))) in service.calls)


def test_a_grant_nobody_waits_for_is_given_back(service: FakeChunkService, client: GrpcChunkService) -> None:
    item = t.ReserveItem(b"k" * 32, 0, 0, 64, (t.ShardSize(0, 4096, 1),))
    service.delay_s = 0.3
    with pytest.raises(errors.ServiceUnavailableError):
        client.reserve(t.ReserveRequest("h-1", 3, (item,)), deadline_s=0.05)
    wait_until(lambda: ("abort", t.AbortRequest("h-1", 3, ("grant-0",))) in service.calls)


def test_an_answer_too_large_is_refused_and_its_lease_given_back(
    service: FakeChunkService, client: GrpcChunkService
) -> None:
    big = make_chunk(1, unit_count=65_536)
    service.chunks = {big.key: big}
    service.holders.add("h-1")
    request = match_request(*(big.key,) * 40)
    with pytest.raises(errors.ServiceError, match="more than 16777216"):
        client.match(request, deadline_s=20.0)
    assert ("release", t.ReleaseRequest("h-1", ("lease-1",))) in service.calls


def test_a_request_too_large_is_refused(service: FakeChunkService, client: GrpcChunkService) -> None:
    request = t.ReleaseRequest("h", ("x" * 200,) * 100_000)
    with pytest.raises(errors.ServiceError, match="too large"):
        client.release(request, deadline_s=DEADLINE_S)
    assert service.calls == []


def test_overload_is_unavailable(service: FakeChunkService, address: str) -> None:
    server = serve(service, address, thread_count=1, max_concurrent_calls=1)
    client = GrpcChunkService(address)
    client.status(deadline_s=DEADLINE_S)
    service.started.clear()
    service.delay_s = 0.5
    busy = threading.Thread(target=client.status, kwargs={"deadline_s": DEADLINE_S})
    busy.start()
    service.started.wait(DEADLINE_S)
    with pytest.raises(errors.ServiceUnavailableError, match="overloaded"):
        client.status(deadline_s=DEADLINE_S)
    busy.join()
    client.close()
    server.stop(0.0)


def test_stop_lets_running_calls_finish(service: FakeChunkService, address: str) -> None:
    server = serve(service, address)
    client = GrpcChunkService(address)
    client.status(deadline_s=DEADLINE_S)
    service.started.clear()
    service.delay_s = 0.3
    replies: list[t.PoolStatus] = []
    running = threading.Thread(target=lambda: replies.append(client.status(deadline_s=DEADLINE_S)))
    running.start()
    service.started.wait(DEADLINE_S)
    server.stop(grace_s=3.0)
    running.join()
    assert replies == [service.current_status]
    with pytest.raises(errors.ServiceUnavailableError, match="cannot be reached"):
        client.status(deadline_s=DEADLINE_S)
    client.close()


def test_stop_has_a_deadline(service: FakeChunkService, address: str) -> None:
    server = serve(service, address)
    client = GrpcChunkService(address)
    service.delay_s = 2.0
    caught: list[Exception] = []

    def ask() -> None:
        try:
            client.status(deadline_s=DEADLINE_S)
        except errors.ServiceUnavailableError as e:
            caught.append(e)

    running = threading.Thread(target=ask)
    running.start()
    service.started.wait(DEADLINE_S)
    began_s = time.monotonic()
    server.stop(grace_s=0.1)
    assert time.monotonic() - began_s < 1.5
    running.join()
    assert len(caught) == 1
    client.close()


def test_a_closed_client_says_so(client: GrpcChunkService) -> None:
    client.status(deadline_s=DEADLINE_S)
    client.close()
    client.close()
    with pytest.raises(errors.ServiceUnavailableError, match="closed"):
        client.status(deadline_s=DEADLINE_S)


def start_process(address: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, fake_service.__file__, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"ready {address}\n"
    return process


def test_a_killed_and_restarted_service_is_found_again(address: str) -> None:
    client = GrpcChunkService(address)
    with pytest.raises(errors.ServiceUnavailableError, match="cannot be reached"):
        client.status(deadline_s=0.5)  # not started yet
    process = start_process(address)
    try:
        wait_until(lambda: answers(client))
        process.kill()
        process.wait()
        began_s = time.monotonic()
        with pytest.raises(errors.ServiceUnavailableError):
            client.status(deadline_s=DEADLINE_S)
        assert time.monotonic() - began_s < 1.0, "a dead service must fail at once, not at the deadline"
        assert Path(address.removeprefix("unix://")).is_socket(), "kill -9 leaves the socket file behind"
        process = start_process(address)
        wait_until(lambda: answers(client), timeout_s=2.0)
        with pytest.raises(errors.StaleHolderError):
            client.match(match_request(b"k" * 32), deadline_s=DEADLINE_S)
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        client.close()


def answers(client: GrpcChunkService) -> bool:
    try:
        client.status(deadline_s=0.5)
    except errors.ServiceUnavailableError:
        return False
    return True


def test_socket_is_for_its_owner_only(server: RunningServer, tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600


def test_a_living_socket_is_never_displaced(server: RunningServer, client: GrpcChunkService, address: str) -> None:
    with pytest.raises(errors.ConfigError, match="another process already serves on"):
        serve(FakeChunkService(), address)
    client.status(deadline_s=DEADLINE_S)


def test_a_stale_socket_is_replaced(service: FakeChunkService, address: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
    server = serve(service, address)
    client = GrpcChunkService(address)
    client.status(deadline_s=DEADLINE_S)
    client.close()
    server.stop(0.0)


def test_a_file_in_the_way_is_left_alone(service: FakeChunkService, address: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(errors.ConfigError, match="is not a socket"):
        serve(service, address)
    assert (tmp_path / "s").read_text() == "precious"


def test_a_missing_socket_directory_is_named(service: FakeChunkService, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="does not exist") as caught:
        serve(service, f"unix://{tmp_path}/no/such/s")
    assert f"mkdir -p {tmp_path}/no/such" in caught.value.next_step


def test_tcp_on_loopback(service: FakeChunkService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = serve(service, "127.0.0.1:0")
    assert not server.address.endswith(":0")
    client = GrpcChunkService(server.address)
    assert client.get_chunk(make_chunk(1).key, deadline_s=DEADLINE_S) == make_chunk(1)
    with pytest.raises(errors.ConfigError, match="port is taken"):
        serve(FakeChunkService(), server.address)
    client.close()
    server.stop(0.0)


def test_an_address_can_be_looked_at_before_it_is_bound(service: FakeChunkService, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
    check_free(UnixAddress(tmp_path / "s"))
    assert (tmp_path / "s").exists(), "looking removes nothing"
    for listen in (f"unix://{tmp_path}/s", "127.0.0.1:0", "localhost:0"):
        server = serve(service, listen)
        with pytest.raises(errors.ConfigError, match=r"already serves|port is taken"):
            check_free(parse_address(server.address))
        server.stop(0.0)
        check_free(parse_address(server.address))
    check_free(parse_address("127.0.0.1:0"))
    with pytest.raises(errors.ConfigError, match="does not exist"):
        check_free(UnixAddress(tmp_path / "none" / "s"))


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "10.1.2.3:7070", "[::]:7070", "example.org:7070"])
def test_public_addresses_are_refused(service: FakeChunkService, listen: str) -> None:
    with pytest.raises(errors.ConfigError, match="not a loopback address") as caught:
        serve(service, listen)
    assert "unix://" in caught.value.next_step
