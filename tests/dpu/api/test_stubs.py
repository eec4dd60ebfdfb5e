"""The committed stubs are what the proto file compiles to, whatever compiler version made them."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.v1 import chunk_pb2

pytest.importorskip("grpc_tools")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_stubs", ROOT / "tools" / "generate_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated(generator: ModuleType) -> dict[str, str]:
    stubs: dict[str, str] = generator.generate()
    return stubs


def test_committed_descriptor_is_current(generated: dict[str, str]) -> None:
    literals = [
        node.value
        for node in ast.walk(ast.parse(generated["chunk_pb2.py"]))
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes)
    ]
    compiled = FileDescriptorProto.FromString(max(literals, key=len))
    committed = FileDescriptorProto.FromString(chunk_pb2.DESCRIPTOR.serialized_pb)
    assert committed == compiled, "run tools/generate_stubs.py"


def test_committed_type_stub_is_current(generated: dict[str, str]) -> None:
    def fields(text: str) -> dict[str, list[str]]:
        return {
            node.name: [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
            for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef)
        }

    committed = (ROOT / "dpu/api/v1/chunk_pb2.pyi").read_text()
    assert fields(committed) == fields(generated["chunk_pb2.pyi"]), "run tools/generate_stubs.py"


def test_stub_needs_no_particular_protobuf_runtime() -> None:
    assert "runtime_version" not in (ROOT / "dpu/api/v1/chunk_pb2.py").read_text()


# The request of an item is sent once for all its items: as a list of names, and a number into it. Which pool is meant
# is a matter of the server, not of the pool that is asked; how chunks are sent, of the client.
SENT_ONCE = {
    **{"ReserveItem": {"request"}, "ReserveRequest": {"request_ids"}, "ListRequest": {"pool"}},
    **{"MatchRequest": {"takes_packed"}, "MatchReply": {"packed_chunks"}},
}


@pytest.mark.parametrize(
    "name",
    [
        *("Extent", "ShardSize", "Shard", "ChunkRecord", "AttachRequest", "Namespace", "Attachment"),
        *("MatchRequest", "MatchReply", "ReleaseRequest", "ReserveItem", "ReserveRequest", "ReserveResult"),
        *("ReserveReply", "CommitItem", "CommitRequest", "CommitReply", "AbortRequest", "HeartbeatRequest"),
        *(
            "HeartbeatReply",
            "Reached",
            "DropRequest",
            "DetachRequest",
            "ListRequest",
            "ListReply",
            "HolderStatus",
            "PoolStatus",
        ),
    ],
)
def test_messages_have_the_fields_of_the_value_types(name: str) -> None:
    message = chunk_pb2.DESCRIPTOR.message_types_by_name[name]
    fields = {f.name for f in dataclasses.fields(getattr(t, name))}
    assert {f.name for f in message.fields} == (
        fields - {"request_id"} if name == "ReserveItem" else fields
    ) | SENT_ONCE.get(name, set())
