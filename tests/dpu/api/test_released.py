"""Engines of the release before meet a service of this one, and the other way round.

``released/VERSION.textproto`` is the descriptor of a release's ``chunk.proto``. To record one, at its release::

    text_format.MessageToString(FileDescriptorProto.FromString(chunk_pb2.DESCRIPTOR.serialized_pb))
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory, text_format
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.running_server import RunningServer
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.v1 import chunk_pb2
from meshfusion.dpu.drain_gate import DrainGate
from meshfusion.dpu.pool import Pool
from tests.dpu.api.compatibility import breaks
from tests.dpu.pool_cases import IDENTITY, UNIT_BYTES, Holder, key, make_pool

RELEASED = sorted(Path(__file__).with_name("released").glob("*.textproto"))
CURRENT = FileDescriptorProto.FromString(chunk_pb2.DESCRIPTOR.serialized_pb)
# What an engine of that release sends when it attaches.
API_VERSIONS = {"0.1.0": 3}
DEADLINE_S = 20.0

pytestmark = pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)


def descriptor(path: Path) -> FileDescriptorProto:
    return text_format.Parse(path.read_text(), FileDescriptorProto())


class Messages:
    """Classes made from a descriptor alone, as its release had them."""

    def __init__(self, file: FileDescriptorProto, release: str = "") -> None:
        self.file, self.release = file, release
        self._pool = descriptor_pool.DescriptorPool()
        self._pool.Add(file)

    def __getattr__(self, name: str) -> Any:
        found = self._pool.FindMessageTypeByName(f"{self.file.package}.{name}")
        return message_factory.GetMessageClass(found)

    @property
    def names(self) -> list[str]:
        return [message.name for message in self.file.message_type]


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_nothing_that_was_released_has_changed(released: Path) -> None:
    assert breaks(descriptor(released), CURRENT) == []


def renumber(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].number = 99


def rename(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].name = "other"


def retype(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].type = FieldDescriptorProto.TYPE_STRING


def repeat(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].label = FieldDescriptorProto.LABEL_REPEATED


def remove_field(file: FileDescriptorProto) -> None:
    del file.message_type[0].field[0]


def remove_message(file: FileDescriptorProto) -> None:
    del file.message_type[0]


def remove_call(file: FileDescriptorProto) -> None:
    del file.service[0].method[0]


def change_answer(file: FileDescriptorProto) -> None:
    file.service[0].method[0].output_type = ".meshfusion.v1.MatchReply"


def remove_service(file: FileDescriptorProto) -> None:
    del file.service[1]


@pytest.mark.parametrize(
    "change",
    [renumber, rename, retype, repeat, remove_field, remove_message, remove_call, change_answer, remove_service],
)
def test_each_way_to_break_it_is_seen(released: Path, change: Callable[[FileDescriptorProto], None]) -> None:
    changed = FileDescriptorProto.FromString(CURRENT.SerializeToString())
    change(changed)
    assert len(breaks(descriptor(released), changed)) == 1


def test_what_was_added_breaks_nothing_and_taking_it_back_would(released: Path) -> None:
    added = FileDescriptorProto.FromString(CURRENT.SerializeToString())
    added.message_type[0].field.add(name="more", number=99, type=FieldDescriptorProto.TYPE_STRING, label=1)
    assert breaks(descriptor(released), added) == []
    assert breaks(added, CURRENT) == [f"{CURRENT.message_type[0].name}.more (99) is gone"]


# ---- messages --------------------------------------------------------------------------------------------------------


def filled(message: Any, depth: int = 0) -> Any:
    """Every field has a value that is not its default."""
    for field in message.DESCRIPTOR.fields:
        is_list = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if field.message_type is not None:
            if depth > 4:
                continue
            part = getattr(message, field.name).add() if is_list else getattr(message, field.name)
            filled(part, depth + 1)
            continue
        value = value_for(field)
        if is_list:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


def value_for(field: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    by_kind = {
        field.CPPTYPE_STRING: b"\x05" if field.type == field.TYPE_BYTES else f"text {field.number}",
        field.CPPTYPE_BOOL: True,
        field.CPPTYPE_DOUBLE: 0.5 + field.number,
        field.CPPTYPE_FLOAT: 0.5 + field.number,
    }
    return by_kind.get(field.cpp_type, 100 + field.number)


def test_messages_mean_the_same_there_and_back(released: Path) -> None:
    former, present = Messages(descriptor(released)), Messages(CURRENT)
    for name in former.names:
        sent = filled(getattr(former, name)())
        understood = getattr(present, name).FromString(sent.SerializeToString())
        for field in sent.DESCRIPTOR.fields:
            assert str(getattr(understood, field.name)) == str(getattr(sent, field.name)), f"{name}.{field.name}"
        answered = getattr(former, name).FromString(filled(getattr(present, name)()).SerializeToString())
        for field in answered.DESCRIPTOR.fields:
            assert answered.HasField(field.name) if field.has_presence else getattr(answered, field.name)


# ---- an engine of the release before ---------------------------------------------------------------------------------


class FormerClient:
    """What an engine of that release calls, in its own messages; it knows nothing that came later."""

    def __init__(self, file: FileDescriptorProto, release: str, address: str) -> None:
        self.m = Messages(file, release)
        self._channel = grpc.insecure_channel(address)
        self._methods = {
            method.name: (service.name, method.output_type.rpartition(".")[2])
            for service in file.service
            for method in service.method
        }

    def call(self, name: str, request: Any) -> Any:
        service, answer = self._methods[name]
        stub: Callable[..., Any] = self._channel.unary_unary(
            f"/{self.m.file.package}.{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(self.m, answer).FromString,
        )
        return stub(request, timeout=DEADLINE_S)

    def attach(self) -> Any:
        request = self.m.AttachRequest(
            incarnation=uuid.uuid4().hex,
            engine_kind="vllm",
            engine_version="0.32.0",
            host="h",
            pid=os.getpid(),
            identity=IDENTITY,
            rank_count=1,
            tenant="default",
            api_version=API_VERSIONS[self.m.release],
            access="local",
        )
        return self.call("Attach", request)

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool:
        yield pool


@pytest.fixture
def gate(pool: Pool) -> DrainGate:
    return DrainGate(pool, pool.held, lambda: 0.0)


@pytest.fixture
def server(gate: DrainGate, tmp_path: Path) -> Iterator[RunningServer]:
    server = serve(gate, f"unix://{tmp_path}/s")
    yield server
    server.stop(0.0)


@pytest.fixture
def client(released: Path, server: RunningServer) -> Iterator[FormerClient]:
    client = FormerClient(descriptor(released), released.stem, server.address)
    yield client
    client.close()


def test_it_attaches_saves_finds_and_leaves(client: FormerClient, pool: Pool) -> None:
    m = client.m
    place = client.attach()
    lock = hold_liveness(Path(place.liveness_path))
    size = m.ShardSize(rank=0, unit_bytes=UNIT_BYTES, unit_count=3)
    item = m.ReserveItem(key=key(1), group=0, position_tokens=0, token_count=16, shards=[size], copies=1)
    reserve = m.ReserveRequest(holder_id=place.holder_id, epoch=place.epoch, items=[item])
    (granted,) = client.call("Reserve", reserve).results
    assert granted.grant_id
    digests = bytes(8) * 3
    commit_item = m.CommitItem(grant_id=granted.grant_id, unit_digests=[digests])
    commit = m.CommitRequest(holder_id=place.holder_id, epoch=place.epoch, items=[commit_item])
    assert list(client.call("Commit", commit).committed) == [True]
    group = m.GroupKeys(group=0, keys=[key(1)])
    match = m.MatchRequest(holder_id=place.holder_id, request_id="r", chunk_tokens=16, groups=[group])
    found = client.call("Match", match)
    assert found.lease_id
    assert [chunk.key for chunk in found.chunks] == [key(1)]
    beat = m.HeartbeatRequest(holder_id=place.holder_id, epoch=place.epoch, lease_ids=[found.lease_id, "other"])
    assert list(client.call("Heartbeat", beat).lost_lease_ids) == ["other"]
    client.call("Release", m.ReleaseRequest(holder_id=place.holder_id, lease_ids=[found.lease_id]))
    status = client.call("Status", m.StatusRequest())
    assert (status.committed_chunk_count, status.lease_count, status.grant_count) == (1, 0, 0)
    os.close(lock)
    client.call("Detach", m.DetachRequest(holder_id=place.holder_id))
    assert pool.status(deadline_s=1.0).holders == ()


def test_it_takes_a_service_that_drains_for_one_that_cannot_be_reached(client: FormerClient, gate: DrainGate) -> None:
    gate.begin(30.0)
    with pytest.raises(grpc.RpcError) as refused:
        client.attach()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_it_and_an_engine_of_today_share_chunks(client: FormerClient, pool: Pool) -> None:
    assert Holder(pool).put(0)
    place = client.attach()
    m = client.m
    group = m.GroupKeys(group=0, keys=[key(0)])
    match = m.MatchRequest(holder_id=place.holder_id, request_id="r", chunk_tokens=16, groups=[group])
    reply = client.call("Match", match)
    assert [chunk.key for chunk in reply.chunks] == [key(0)]
    (shard,) = reply.chunks[0].shards
    assert len(shard.unit_digests) == 3 * 8
