"""The administration of drives on the wire: there and back, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api import codec_drives as codec
from meshfusion.dpu.api import drive_types as t
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.drive_client import GrpcDriveAdmin
from meshfusion.dpu.api.limits import MalformedMessageError
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import ConfigError, UnsupportedError
from tests.dpu.api.fake_service import FakeChunkService

TEXT = st.text(max_size=30)
STATUS = st.builds(
    t.DriveStatus,
    number=st.integers(0, 254),
    state=st.sampled_from(["online", "gone"]),
    reasons=st.lists(TEXT, max_size=3).map(tuple),
    path=TEXT,
    serial=TEXT,
    segment_count=st.integers(0, 1 << 40),
    size_bytes=st.integers(0, 1 << 60),
    percentage_used=st.integers(-1, 255),
    months_left=st.just(-1.0) | st.floats(0.0),
    problem=TEXT,
    written_bytes=st.integers(-1, 1 << 60),
    media_errors=st.integers(-1, 1 << 60),
    spare_percent=st.integers(-1, 255),
    write_budget_left_bytes=st.integers(-1, 1 << 60),
    failed_command_count=st.integers(0, 1 << 60),
    read_latency_s=st.just(-1.0) | st.floats(0.0, 1e6),
)
ONE = t.DriveStatus(1, "gone", ("it is not there",), "/dev/a", "S1", 5, 5 << 20, 3, "no such file")


class FakeAdmin:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def drives(self, *, deadline_s: float) -> tuple[t.DriveStatus, ...]:
        return (ONE,)

    def add_drive(self, request: t.AddDriveRequest, *, deadline_s: float) -> t.DriveStatus:
        self.calls.append(request)
        return ONE

    def drain_drive(self, request: t.DrainDriveRequest, *, deadline_s: float) -> t.DriveStatus:
        self.calls.append(request)
        return ONE

    def remove_drive(self, request: t.RemoveDriveRequest, *, deadline_s: float) -> int:
        raise ConfigError(f"no drive {request.number}", next_step="name another")


@given(st.lists(STATUS, max_size=4).map(tuple))
def test_what_is_told_arrives(drives: tuple[t.DriveStatus, ...]) -> None:
    wire = codec.drives_reply_to_pb(drives).SerializeToString()
    assert codec.drives_reply_from_pb(pb.DrivesReply.FromString(wire)) == drives


@pytest.mark.parametrize(
    "changes",
    [{"state": ""}, {"percentage_used": 256}, {"percentage_used": -2}, {"path": "x" * 5000}, {"months_left": -2.0}],
)
def test_what_no_drive_says_is_refused(changes: dict[str, object]) -> None:
    message = codec.drive_status_to_pb(ONE)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(MalformedMessageError):
        codec.drive_status_from_pb(message)


def test_a_drive_of_no_size_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="size_bytes"):
        codec.add_drive_request_from_pb(pb.AddDriveRequest(size_bytes=0))


def test_operators_are_served_beside_engines(tmp_path: Path) -> None:
    admin = FakeAdmin()
    server = serve(FakeChunkService(), f"unix://{tmp_path}/s", admin=admin)
    client, engine = GrpcDriveAdmin(server.address), GrpcChunkService(server.address)
    try:
        assert client.drives(deadline_s=5) == (ONE,)
        requests = (t.AddDriveRequest(5 << 20, "/dev/a", "S1"), t.DrainDriveRequest(1, is_ended=True))
        assert client.add_drive(requests[0], deadline_s=5) == client.drain_drive(requests[1], deadline_s=5) == ONE
        assert admin.calls == list(requests)
        with pytest.raises(ConfigError, match="no drive 9"):
            client.remove_drive(t.RemoveDriveRequest(9), deadline_s=5)
        assert engine.status(deadline_s=5).epoch == 3
    finally:
        client.close()
        engine.close()
        server.stop(0.0)


def test_a_service_without_administration_says_so(tmp_path: Path) -> None:
    server = serve(FakeChunkService(), f"unix://{tmp_path}/s")
    client = GrpcDriveAdmin(server.address)
    try:
        with pytest.raises(UnsupportedError, match="does not know the call Drives"):
            client.drives(deadline_s=5)
    finally:
        client.close()
        server.stop(0.0)
