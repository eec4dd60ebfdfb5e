"""Whatever arrives, the service answers with a status that its API documents, keeps its memory, and goes on.

Over a real server with a real pool: random bytes to every call, and messages like real ones with a few fields changed.
``MESHFUSION_FUZZ_EXAMPLES`` sets how many; the nightly test takes many more.
"""

from __future__ import annotations

import math
import os
import resource
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshfusion.dpu.access.audit_log import AuditLog
from meshfusion.dpu.api.drive_types import AddDriveRequest, DriveAdmin, DriveStatus
from meshfusion.dpu.api.error_codec import DETAIL_METADATA_KEY
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.roles import RULES
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.types import API_VERSION
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.telemetry.calls import CallWatch
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.jbof.errors import ConfigError
from tests.dpu.api.fake_operation import FakeOperation
from tests.dpu.pool_cases import IDENTITY, make_pool

EXAMPLES = int(os.environ.get("MESHFUSION_FUZZ_EXAMPLES", "40"))
NIGHTLY_EXAMPLES = 20 * EXAMPLES
DEADLINE_S = 20.0
STREAM_S = 0.2
MEMORY_BYTES = 512 << 20  # more than the server's 256 calls of small messages could hold, less than a leak of them
Code = grpc.StatusCode
# docs/security.md tells when which comes. UNKNOWN is what gRPC makes of a server that fails without a word.
DOCUMENTED = {
    *(Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.UNAVAILABLE, Code.UNIMPLEMENTED),
    *(Code.RESOURCE_EXHAUSTED, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED),
}


class OnlyInside:
    """The pool's own administration, which may write to whatever path it is told: here to none but the pool's."""

    def __init__(self, admin: DriveAdmin) -> None:
        self._admin = admin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def add_drive(self, request: AddDriveRequest, *, deadline_s: float) -> DriveStatus:
        if request.data_path or request.size_bytes > 64 << 20:
            raise ConfigError("not in this test", next_step="None.")
        return self._admin.add_drive(request, deadline_s=deadline_s)


class LoudCallWatch(CallWatch):
    """What cannot be traced fails its call here, instead of being logged."""

    def answered(self, call: str, request: Message, reply: Message | None) -> None:
        self._parts.of(call, request, reply)
        super().answered(call, request, reply)


class Rig:
    def __init__(self, folder: Path) -> None:
        make_pool(folder / "pool")
        self.pool = Pool.open(folder / "pool")
        self.audit = AuditLog(folder / "audit.log")
        admin: Any = OnlyInside(self.pool.drive_admin)
        calls = LoudCallWatch(slow_call_s=5.0)
        self.server = serve(
            self.pool,
            f"unix://{folder}/s",
            admin=admin,
            operation=FakeOperation(),
            guard=Guard(audit=self.audit),
            observer=calls,
            events=EventLog(),
            traces=calls,
        )
        self.channel = grpc.insecure_channel(self.server.address)
        self.holder_id = ""
        self.epoch = 0

    def call(self, name: str, raw: bytes) -> tuple[Code, bytes]:
        service, _, method = name.partition(".")
        found_method = pb.DESCRIPTOR.services_by_name[service].methods_by_name.get(method)
        is_stream = found_method is not None and found_method.server_streaming
        open_call = self.channel.unary_stream if is_stream else self.channel.unary_unary
        call: Any = open_call(f"/meshfusion.v1.{service}/{method}")
        try:
            reply = call(raw, timeout=STREAM_S if is_stream else DEADLINE_S)
            return Code.OK, b"".join(reply) if is_stream else reply
        except grpc.RpcError as error:
            if is_stream and error.code() is Code.DEADLINE_EXCEEDED:
                return Code.OK, b""  # it was to be followed, and nothing came
            found: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
            detail = pb.ErrorDetail.FromString(found[DETAIL_METADATA_KEY])
            assert detail.kind, "a refusal says what it is"
            assert detail.next_step, "and what to do"
            return error.code(), b""

    def attach(self) -> None:
        """As a good caller does; a fuzzed one may have detached it since."""
        request = pb.AttachRequest(
            incarnation=uuid.uuid4().hex, engine_kind="vllm", engine_version="1", host="h", pid=1, identity=IDENTITY,
            rank_count=1, tenant="default", api_version=API_VERSION,
        )  # fmt: skip
        code, raw = self.call("ChunkService.Attach", request.SerializeToString())
        assert code is Code.OK
        reply = pb.Attachment.FromString(raw)
        self.holder_id, self.epoch = reply.holder_id, reply.epoch

    def check_alive(self) -> None:
        code, raw = self.call("ChunkService.Status", b"")
        assert code is Code.OK
        assert pb.PoolStatus.FromString(raw).pool_uuid == self.pool.pool_uuid

    def close(self) -> None:
        self.channel.close()
        self.server.stop(0.0)
        self.pool.close()
        self.audit.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("fuzz"))
    rig.attach()
    yield rig
    rig.close()


INTS = {
    FieldDescriptor.TYPE_UINT32: st.one_of(st.integers(0, 4), st.sampled_from([64, 4096, 2**31, 2**32 - 1])),
    FieldDescriptor.TYPE_UINT64: st.one_of(
        st.integers(0, 4), st.sampled_from([64, 4096, 1 << 20, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
    ),
}
DOUBLES = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-9, 1e300, math.inf, -math.inf, math.nan]))
TEXTS = st.one_of(
    st.sampled_from(["", "default", "local", "nvmeof", "vllm", "..", "/", "a\0b", "%s%n", "x" * 5_000, "🜁"]),
    st.text(max_size=20),
)
SECONDS = st.one_of(st.sampled_from([0.0, -1.0, 1e-9, 0.01, 1e308, float("nan"), float("inf")]), st.floats(0, 0.1))
BYTES = st.one_of(st.sampled_from([b"", b"k" * 32, b"k" * 31, b"d" * 8, IDENTITY]), st.binary(max_size=40))


def values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(GetMessageClass(field.message_type), depth + 1)
    if field.type in INTS:
        return INTS[field.type]
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return DOUBLES
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return SECONDS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return BYTES
    assert field.type == FieldDescriptor.TYPE_BOOL, f"{field.full_name}: add its type here"
    return st.booleans()


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], depth: int = 0) -> Message:
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if not draw(st.integers(0, 3)):
            continue  # absent
        if hasattr(getattr(message, field.name), "extend"):  # repeated: how that is asked differs between protobufs
            some = draw(st.lists(values(field, depth), max_size=3))
            getattr(message, field.name).extend(some)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(values(field, depth)))
        else:
            setattr(message, field.name, draw(values(field, depth)))
    return message


def make_plausible(message: Any, rig: Rig, which: int) -> None:
    """As the holder that is attached, so that what is behind the first check is reached too."""
    names = message.DESCRIPTOR.fields_by_name
    if "holder_id" in names and which & 1:
        message.holder_id = rig.holder_id
    if "epoch" in names and which & 2:
        message.epoch = rig.epoch
    if isinstance(message, pb.AttachRequest) and which & 1:
        message.api_version, message.engine_kind, message.tenant = API_VERSION, "vllm", "default"
        message.identity, message.rank_count = IDENTITY, 1
    for item in getattr(message, "items", ()) if which & 4 else ():
        if isinstance(item, pb.ReserveItem):
            item.key = item.key.ljust(32, b"k")[:32]
            item.token_count, item.position_tokens, item.copies, item.request = 64, 0, 1, 0


def check(rig: Rig, name: str, raw: bytes) -> None:
    code, _ = rig.call(name, raw)
    assert code in DOCUMENTED, f"{name} answered {code} to {raw!r}"


def quick(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def request_class(name: str) -> type[Message]:
    service, _, method = name.partition(".")
    return GetMessageClass(pb.DESCRIPTOR.services_by_name[service].methods_by_name[method].input_type)


def fuzz(rig: Rig, name: str, examples: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    @quick(examples)
    @given(st.binary(max_size=200))
    def random_bytes(raw: bytes) -> None:
        check(rig, name, raw)

    @quick(examples)
    @given(messages(request_class(name)), st.integers(0, 7))
    def changed_messages(message: Message, which: int) -> None:
        make_plausible(message, rig, which)
        check(rig, name, message.SerializeToString())

    @quick(examples)
    @given(messages(request_class(name)), st.integers(0, 7), st.data())
    def damaged_messages(message: Message, which: int, data: st.DataObject) -> None:
        make_plausible(message, rig, which)
        raw = bytearray(message.SerializeToString())
        for _ in range(data.draw(st.integers(1, 3))):
            if raw:
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        check(rig, name, bytes(raw))

    for test in (random_bytes, changed_messages, damaged_messages):
        test()
        rig.check_alive()
    rig.attach()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < MEMORY_BYTES


@pytest.mark.parametrize("name", list(RULES))
def test_every_call_survives_nonsense(rig: Rig, name: str) -> None:
    fuzz(rig, name, EXAMPLES)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(RULES))
def test_every_call_survives_much_nonsense(rig: Rig, name: str) -> None:
    fuzz(rig, name, NIGHTLY_EXAMPLES)


def test_a_message_of_millions_of_parts_is_refused(rig: Rig) -> None:
    """Within the bytes of a message, what protobuf can make of it: empty parts cost two bytes each."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    part_counts = 1_000_000
    for name, field in (("Match", 6), ("Reserve", 3), ("Commit", 3), ("Abort", 3), ("Heartbeat", 3)):
        raw = b"\x0a" + bytes([len(rig.holder_id)]) + rig.holder_id.encode() + bytes([field << 3 | 2, 0]) * part_counts
        code, _ = rig.call(f"ChunkService.{name}", raw)
        assert code in DOCUMENTED - {Code.OK}, name
    rig.check_alive()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < MEMORY_BYTES
