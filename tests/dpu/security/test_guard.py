"""Who may do what, over a real server: roles, tenants, own holders; by certificate and by token."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from meshfusion.dpu.access.audit_log import REFUSALS_PER_MINUTE, AuditLog
from meshfusion.dpu.access.tokens_file import TokensFile
from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.drive_client import GrpcDriveAdmin
from meshfusion.dpu.api.drive_types import DriveStatus, RemoveDriveRequest
from meshfusion.dpu.api.error_codec import DETAIL_METADATA_KEY
from meshfusion.dpu.api.limits import MAX_MESSAGE_BYTES, MalformedMessageError
from meshfusion.dpu.api.running_server import RunningServer
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.identity import CallerIdentity
from meshfusion.dpu.api.security.principal import LOCAL, Principal, PrincipalKind
from meshfusion.dpu.api.security.roles import RULES, Role, roles_table
from meshfusion.dpu.api.security.rotated import FRESH_S
from meshfusion.dpu.api.security.server_tls import ServerTls
from meshfusion.dpu.api.security.token_text import digest_of, token_of
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.jbof import errors
from tests.dpu.api.fake_operation import FakeOperation
from tests.dpu.api.fake_service import FakeChunkService, make_chunk
from tests.dpu.security.authority import Authority, client_of, replace, server_files

DEADLINE_S = 5.0
TOKENS = {name: token_of(bytes([n]) * 32) for n, name in enumerate(("engine-1", "engine-2", "operator", "reader"))}
ROLES = {"engine-1": "engine", "engine-2": "engine", "operator": "operator", "reader": "read-only"}


class FakeAdmin:
    def __init__(self) -> None:
        self.removed: list[int] = []
        self.failure: Exception | None = None

    def drives(self, *, deadline_s: float) -> tuple[DriveStatus, ...]:
        return ()

    def add_drive(self, request: Any, *, deadline_s: float) -> DriveStatus:
        raise errors.ConfigError("no", next_step="No.")

    def drain_drive(self, request: Any, *, deadline_s: float) -> DriveStatus:
        raise errors.ConfigError("no", next_step="No.")

    def remove_drive(self, request: RemoveDriveRequest, *, deadline_s: float) -> int:
        self.removed.append(request.number)
        if self.failure is not None:
            raise self.failure
        return 3


def write_tokens(path: Path, **names: str) -> Path:
    entries = [{"name": n, "sha256": digest_of(TOKENS[n]), "role": role} for n, role in (names or ROLES).items()]
    replace(path, json.dumps(entries).encode(), mode=0o600)  # JSON is YAML
    return path


class Rig:
    """A service on a loopback port that asks for tokens, and clients that show one."""

    def __init__(self, folder: Path, *, names: dict[str, str] = ROLES) -> None:
        self.folder = folder
        self.service = FakeChunkService((make_chunk(1),))
        self.admin = FakeAdmin()
        self.audit_path = folder / "audit.log"
        self.tokens_path = write_tokens(folder / "tokens.json", **names)
        self.audit = AuditLog(self.audit_path)
        self.guard = Guard(CallerIdentity(find_token=TokensFile(self.tokens_path).find), self.audit)
        self.server = serve(
            self.service,
            "127.0.0.1:0",
            admin=self.admin,
            operation=FakeOperation(),
            guard=self.guard,
            events=EventLog(),
            traces=CallWatch(slow_call_s=5.0),
        )
        self._clients: list[GrpcChunkService | GrpcDriveAdmin] = []

    def security(self, name: str) -> ClientSecurity:
        path = self.folder / f"{name}.token"
        replace(path, TOKENS[name].encode() + b"\n", mode=0o600)
        return ClientSecurity(token_file=path)

    def client(self, name: str) -> GrpcChunkService:
        client = GrpcChunkService(self.server.address, self.security(name))
        self._clients.append(client)
        return client

    def admin_client(self, name: str, *, pool: str = "") -> GrpcDriveAdmin:
        client = GrpcDriveAdmin(self.server.address, self.security(name), pool=pool)
        self._clients.append(client)
        return client

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_path.read_text().splitlines()]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.stop(0.0)
        self.audit.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def attach_request(**changes: Any) -> t.AttachRequest:
    fields: dict[str, Any] = {
        "incarnation": "ab" * 16,
        "engine_kind": "vllm",
        "engine_version": "0.32.0",
        "host": "box",
        "pid": 77,
        "identity": b"\x11" * 32,
        "rank_count": 1,
        **changes,
    }
    return t.AttachRequest(**fields)


def raw_call(server: RunningServer, name: str, token: str | None, scheme: str = "Bearer ") -> grpc.StatusCode:
    """With an empty request, or almost; any gRPC tool can do that."""
    service, _, method = name.partition(".")
    metadata = None if token is None else (("authorization", f"{scheme}{token}"),)
    with grpc.insecure_channel(server.address) as channel:
        is_stream = method_of(name).server_streaming
        call: Any = (channel.unary_stream if is_stream else channel.unary_unary)(f"/meshfusion.v1.{service}/{method}")
        try:
            body = pb.AttachRequest(tenant="default") if method == "Attach" else pb.StatusRequest()
            reply = call(body.SerializeToString(), timeout=DEADLINE_S, metadata=metadata)
            if is_stream:
                list(reply)
        except grpc.RpcError as error:
            found: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
            assert pb.ErrorDetail.FromString(found[DETAIL_METADATA_KEY]).next_step
            return error.code()
        return grpc.StatusCode.OK


# What each role may do, written down once more by hand: whoever changes the table changes this too.
MAY = {
    "engine": {"Attach", "Match", "Release", "Reserve", "Commit", "Abort", "Heartbeat", "Drop", "Detach"},
    "operator": {
        "Status",
        "ListChunks",
        "GetChunk",
        "Events",
        "Trace",
        "State",
        "Drives",
        "AddDrive",
        "DrainDrive",
        "RemoveDrive",
    }
    | {"Drain", "Reload", "Stacks", "ReplaceKeys"},
    "read-only": {"Status", "ListChunks", "GetChunk", "Events", "Trace", "State", "Drives"},
}


@pytest.mark.parametrize("name", list(RULES))
def test_every_call_is_for_its_roles_only(rig: Rig, name: str) -> None:
    method = name.partition(".")[2]
    assert raw_call(rig.server, name, None) is grpc.StatusCode.UNAUTHENTICATED
    assert raw_call(rig.server, name, token_of(b"?" * 32)) is grpc.StatusCode.UNAUTHENTICATED
    assert raw_call(rig.server, name, TOKENS["operator"], scheme="Basic ") is grpc.StatusCode.UNAUTHENTICATED
    rig.service.calls.clear()
    for who, role in ROLES.items():
        code = raw_call(rig.server, name, TOKENS[who])
        is_holders = "holder_id" in GetMessageClass(method_of(name).input_type).DESCRIPTOR.fields_by_name
        if method not in MAY[role]:
            assert code is grpc.StatusCode.PERMISSION_DENIED, who
            assert rig.service.calls == []
        elif is_holders:
            assert code is grpc.StatusCode.PERMISSION_DENIED, "an empty holder id is nobody's"
        else:
            assert code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), who
    assert f"| `{name}` | {' | '.join('yes' if method in MAY[r.value] else '' for r in Role)} |" in roles_table()


def method_of(name: str) -> Any:
    service, _, method = name.partition(".")
    return pb.DESCRIPTOR.services_by_name[service].methods_by_name[method]


def test_nothing_is_asked_on_a_socket_without_tokens(tmp_path: Path) -> None:
    """As before: the socket's mode is the guard."""
    server = serve(FakeChunkService(), f"unix://{tmp_path}/s", guard=Guard())
    client = GrpcChunkService(server.address)
    assert client.attach(attach_request(), deadline_s=DEADLINE_S).holder_id == "h-1"
    client.status(deadline_s=DEADLINE_S)
    client.detach(t.DetachRequest("h-1"), deadline_s=DEADLINE_S)
    client.close()
    server.stop(0.0)


def test_a_wrong_role_says_which_is_needed(rig: Rig) -> None:
    with pytest.raises(errors.PermissionDeniedError, match="for the role operator; token:reader has read-only"):
        rig.admin_client("reader").remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
    assert rig.admin.removed == []
    (refused,) = rig.records()
    assert (refused["principal"], refused["outcome"]) == ("token:reader", "PermissionDeniedError")


def test_who_has_no_rights_cannot_fill_the_log(rig: Rig) -> None:
    reader, engine = rig.admin_client("reader"), rig.admin_client("engine-1")
    for _ in range(REFUSALS_PER_MINUTE + 5):
        with pytest.raises(errors.PermissionDeniedError):
            reader.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
    with pytest.raises(errors.PermissionDeniedError):
        engine.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
    told = [record["principal"] for record in rig.records()]
    assert told == ["token:reader"] * REFUSALS_PER_MINUTE + ["token:engine-1"], "the one does not hide the other"
    assert rig.guard.counts()["calls_denied"] == REFUSALS_PER_MINUTE + 6, "all of them are counted"


def holder_calls(holder_id: str) -> dict[str, Callable[[GrpcChunkService], object]]:
    extent = t.Extent(1, 1, 64, 33, 7)
    return {
        "Match": lambda c: c.match(
            t.MatchRequest(holder_id, "r", 64, (t.GroupKeys(0, (), ()),)), deadline_s=DEADLINE_S
        ),
        "Release": lambda c: c.release(t.ReleaseRequest(holder_id, ("l",)), deadline_s=DEADLINE_S),
        "Reserve": lambda c: c.reserve(t.ReserveRequest(holder_id, 3, ()), deadline_s=DEADLINE_S),
        "Commit": lambda c: c.commit(t.CommitRequest(holder_id, 3, ()), deadline_s=DEADLINE_S),
        "Abort": lambda c: c.abort(t.AbortRequest(holder_id, 3, ("g",)), deadline_s=DEADLINE_S),
        "Heartbeat": lambda c: c.heartbeat(t.HeartbeatRequest(holder_id, 3, ()), deadline_s=DEADLINE_S),
        "Drop": lambda c: c.drop(t.DropRequest(holder_id, b"k" * 32, extent, "why"), deadline_s=DEADLINE_S),
        "Detach": lambda c: c.detach(t.DetachRequest(holder_id), deadline_s=DEADLINE_S),
    }


def test_holders_are_their_principals_own(rig: Rig) -> None:
    one, two = rig.client("engine-1"), rig.client("engine-2")
    one.attach(attach_request(), deadline_s=DEADLINE_S)
    (_, request), *_ = rig.service.calls
    assert isinstance(request, t.AttachRequest)
    holder_id = request.incarnation  # with which the store makes the holder
    assert holder_id.startswith("ab" * 16 + "-")
    assert len(holder_id) <= 64
    calls = holder_calls(holder_id)
    in_proto = {
        m.name
        for m in pb.DESCRIPTOR.services_by_name["ChunkService"].methods
        if "holder_id" in GetMessageClass(m.input_type).DESCRIPTOR.fields_by_name
    }
    assert calls.keys() == in_proto
    rig.service.calls.clear()
    for name, call in calls.items():
        with pytest.raises(errors.PermissionDeniedError, match="token:engine-2 did not attach"):
            call(two)
        assert rig.service.calls == [], name
    assert rig.guard.counts()["calls_for_foreign_holders"] == len(calls)
    counters = dict(rig.client("reader").status(deadline_s=DEADLINE_S).counters)
    assert counters["calls_for_foreign_holders"] == len(calls)
    for call in calls.values():
        with suppress(errors.StaleHolderError):  # of the fake service, which made up another id
            call(one)
    assert len(rig.service.calls) == len(calls) + 1, "and the status"


def test_the_same_incarnation_of_another_principal_is_another_holder(rig: Rig) -> None:
    """So nobody can attach in another one's place, also after a restart, nor again under an id with its tag."""
    for name in ("engine-1", "engine-2", "engine-1"):
        rig.client(name).attach(attach_request(), deadline_s=DEADLINE_S)
    first, second, again = [r.incarnation for _, r in rig.service.calls if isinstance(r, t.AttachRequest)]
    assert first == again
    assert first != second
    rig.service.calls.clear()
    with pytest.raises(MalformedMessageError, match="incarnation is longer than 43"):
        rig.client("engine-2").attach(attach_request(incarnation=first), deadline_s=DEADLINE_S)
    short = "x" + first[32:]
    rig.client("engine-2").attach(attach_request(incarnation=short), deadline_s=DEADLINE_S)
    (_, request), *_ = rig.service.calls
    assert isinstance(request, t.AttachRequest)
    engine_1 = Principal(PrincipalKind.TOKEN, "engine-1", frozenset({Role.ENGINE}), "default")
    assert engine_1.owns(first)
    assert not engine_1.owns(request.incarnation)


def test_certificates_and_tokens_of_one_name_are_two_principals() -> None:
    roles = frozenset({Role.ENGINE})
    by_token, by_certificate = (
        Principal(k, "a", roles, "default") for k in (PrincipalKind.TOKEN, PrincipalKind.CERTIFICATE)
    )
    assert not by_token.owns(by_certificate.holder_id("i"))
    assert LOCAL.holder_id("i") == "i"
    assert not by_token.owns("i")


def test_a_tenant_attaches_for_itself_only(rig: Rig) -> None:
    with pytest.raises(errors.PermissionDeniedError, match="of the tenant 'default' and cannot attach for 'other'"):
        rig.client("engine-1").attach(attach_request(tenant="other"), deadline_s=DEADLINE_S)
    assert rig.service.calls == []
    assert rig.guard.counts()["calls_denied"] == 1


def test_certificates_have_roles_too_and_a_token_beside_one_counts(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    subject = Principal(PrincipalKind.CERTIFICATE, "looker", frozenset({Role.READ_ONLY}), "default")
    tokens = TokensFile(write_tokens(tmp_path / "tokens.json"))
    guard = Guard(CallerIdentity({"looker": subject}, tokens.find))
    server = serve(
        FakeChunkService(), "127.0.0.1:0", admin=FakeAdmin(), guard=guard, tls=ServerTls(server_files(ca, ca))
    )
    pair = ca.issue("looker")
    token_file = tmp_path / "t"
    replace(token_file, TOKENS["operator"].encode(), mode=0o600)
    plain = GrpcDriveAdmin(server.address, client_of(ca, pair))
    with_token = GrpcDriveAdmin(server.address, client_of(ca, pair, token_file))
    assert plain.drives(deadline_s=DEADLINE_S) == ()
    with pytest.raises(errors.PermissionDeniedError):
        plain.remove_drive(RemoveDriveRequest(0), deadline_s=DEADLINE_S)
    assert with_token.remove_drive(RemoveDriveRequest(0), deadline_s=DEADLINE_S) == 3
    replace(token_file, TOKENS["engine-1"].encode(), mode=0o600)
    time.sleep(FRESH_S)
    with pytest.raises(errors.PermissionDeniedError):
        with_token.remove_drive(RemoveDriveRequest(0), deadline_s=DEADLINE_S)
    plain.close()
    with_token.close()
    server.stop(0.0)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_a_changed_tokens_file_counts_when_a_look_at_it_is_due(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    client = rig.client("reader")
    client.status(deadline_s=DEADLINE_S)
    write_tokens(rig.tokens_path, operator="operator")
    time.sleep(FRESH_S)
    with pytest.raises(errors.UnauthenticatedError, match="not one of this service's"):
        client.status(deadline_s=DEADLINE_S)
    write_tokens(rig.tokens_path, operator="operator", reader="read-only")
    time.sleep(FRESH_S)
    client.status(deadline_s=DEADLINE_S)
    with caplog.at_level(logging.ERROR, logger="meshfusion.security"):
        for _ in range(3):
            if rig.tokens_path.stat().st_mode & 0o044 == 0:
                rig.tokens_path.chmod(0o644)
                time.sleep(FRESH_S)
            client.status(deadline_s=DEADLINE_S)
        (told,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "chmod 600" in told.getMessage()
    assert rig.guard.counts()["calls_unauthenticated"] == 1


def test_tokens_are_in_no_log_and_no_repr(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    secret = TOKENS["operator"]
    with caplog.at_level(logging.DEBUG):
        client = rig.admin_client("operator")
        client.remove_drive(RemoveDriveRequest(2), deadline_s=DEADLINE_S)
        raw_call(rig.server, "ChunkService.Status", secret[:-1])
        raw_call(rig.server, "ChunkService.Status", secret, scheme="Basic ")
    shown = caplog.text + rig.audit_path.read_text() + repr(vars(client)) + repr(rig.security("operator"))
    assert secret[:-1] not in shown
    assert "mft_" not in shown


def test_a_token_goes_over_no_open_wire(tmp_path: Path) -> None:
    for address in ("10.0.0.1:7700", "pool.example:7700", "[2001:db8::1]:7700"):
        with pytest.raises(errors.ConfigError, match="not on this machine, and without TLS"):
            GrpcChunkService(address, ClientSecurity(token_file=tmp_path / "t"))
        with pytest.raises(errors.ConfigError, match="without TLS"):
            GrpcChunkService(address)


@pytest.mark.parametrize(
    ("data", "mode", "message"),
    [
        (b"secret stuff", 0o600, "does not hold a token"),
        (b"", 0o600, "does not hold a token"),
        (TOKENS["reader"].encode(), 0o640, None),
        (TOKENS["reader"].encode(), 0o604, "has the mode 0604"),
        (TOKENS["reader"].encode(), 0o660, "has the mode 0660"),
    ],
)
def test_the_callers_token_file(rig: Rig, data: bytes, mode: int, message: str | None) -> None:
    path = rig.folder / "given"
    replace(path, data, mode=mode)
    client = GrpcChunkService(rig.server.address, ClientSecurity(token_file=path))
    if message is None and path.stat().st_gid == 0:
        client.status(deadline_s=DEADLINE_S)
    else:
        with pytest.raises(errors.ConfigError, match=message or "mode 0640") as caught:
            client.status(deadline_s=DEADLINE_S)
        assert "secret stuff" not in str(caught.value)
    client.close()


@pytest.mark.parametrize("shown", [None, f"Bearer {token_of(bytes([99]) * 32)}", "Basic eA=="])
def test_of_callers_that_nobody_knows_no_message_is_read(rig: Rig, shown: str | None) -> None:
    """Each would take as much memory as a message may have. One that has more tells whether it was looked at."""
    body, options = bytes(MAX_MESSAGE_BYTES + 1), [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(rig.server.address, options=options) as channel:
        match: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/meshfusion.v1.ChunkService/Match")
        for text, code in ((f"Bearer {TOKENS['engine-1']}", "RESOURCE_EXHAUSTED"), (shown, "UNAUTHENTICATED")):
            with pytest.raises(grpc.RpcError) as refused:
                match(body, timeout=DEADLINE_S, metadata=(("authorization", text),) if text else ())
            assert refused.value.code().name == code
    assert rig.guard.counts()["calls_unauthenticated"] == 1
    assert rig.service.calls == []
