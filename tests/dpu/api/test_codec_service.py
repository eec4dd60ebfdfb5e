"""The administration of the service's process on the wire: there and back, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.api import codec_service as codec
from meshfusion.dpu.api import service_types as t
from meshfusion.dpu.api.limits import MalformedMessageError
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.service_client import GrpcServiceAdmin
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import ServiceDrainingError, ServiceUnavailableError, UnsupportedError
from tests.dpu.api.fake_service import FakeChunkService

COUNT = st.integers(0, 1 << 40)
STATE = st.builds(
    t.ServiceState,
    version=st.text(min_size=1, max_size=30),
    pid=st.integers(0, 1 << 22),
    uptime_s=st.floats(0, 1e9),
    phase=st.sampled_from(t.Phase),
    remaining_s=st.floats(0, 1e5),
    open_write_count=COUNT,
    open_lease_count=COUNT,
)
TEXT = st.text(max_size=30)
CHANGES = st.lists(st.builds(t.ConfigChange, st.text(min_size=1, max_size=30), TEXT, TEXT), max_size=4).map(tuple)
RELOADED = t.ReloadReport((t.ConfigChange("log.level", "info", "debug"),), ())
REPLACED = (t.ReplacedKey("one", t.KeyChange.DONE), t.ReplacedKey("two", t.KeyChange.UNABLE))
ONE = t.ServiceState("1.2", 77, 3.5, t.Phase.DRAINING, 12.5, 3, 4)


class FakeAdmin:
    def __init__(self) -> None:
        self.calls: list[t.DrainRequest | t.ReplaceKeysRequest] = []

    def state(self, *, deadline_s: float) -> t.ServiceState:
        return ONE

    def reload(self, *, deadline_s: float) -> t.ReloadReport:
        return RELOADED

    def replace_keys(self, request: t.ReplaceKeysRequest, *, deadline_s: float) -> tuple[t.ReplacedKey, ...]:
        self.calls.append(request)
        return REPLACED

    def stacks(self, *, deadline_s: float) -> str:
        return "thread 1 main\n"

    def drain(self, request: t.DrainRequest, *, deadline_s: float) -> t.ServiceState:
        self.calls.append(request)
        return ONE


@given(STATE)
def test_a_state_arrives(state: t.ServiceState) -> None:
    wire = codec.service_state_to_pb(state).SerializeToString()
    assert codec.service_state_from_pb(pb.ServiceState.FromString(wire)) == state


@given(st.builds(t.ReloadReport, CHANGES, CHANGES))
def test_what_a_reload_changed_arrives(report: t.ReloadReport) -> None:
    wire = codec.reload_report_to_pb(report).SerializeToString()
    assert codec.reload_report_from_pb(pb.ReloadReply.FromString(wire)) == report


def test_a_long_value_is_cut_rather_than_refused() -> None:
    change = t.ConfigChange("pool.data_path", "x" * 10_000, "y")
    wire = codec.reload_report_to_pb(t.ReloadReport((), (change,))).SerializeToString()
    (arrived,) = codec.reload_report_from_pb(pb.ReloadReply.FromString(wire)).needs_restart
    assert arrived.before == "x" * 4096


@given(st.builds(t.DrainRequest, st.floats(0, 1e5), st.floats(0, 1e5)))
def test_a_request_arrives(request: t.DrainRequest) -> None:
    wire = codec.drain_request_to_pb(request).SerializeToString()
    assert codec.drain_request_from_pb(pb.DrainRequest.FromString(wire)) == request


@pytest.mark.parametrize("field", ["deadline_s", "wait_s"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_seconds_that_are_none_are_refused(field: str, value: float) -> None:
    with pytest.raises(MalformedMessageError, match=field):
        codec.drain_request_from_pb(pb.DrainRequest(**{field: value}))


KEYS = st.lists(st.builds(t.ReplacedKey, st.text(min_size=1, max_size=30), st.sampled_from(t.KeyChange)), max_size=4)


@given(st.builds(t.ReplaceKeysRequest, TEXT, TEXT, st.floats(0, 1e5)), KEYS.map(tuple))
def test_what_became_of_keys_arrives(request: t.ReplaceKeysRequest, keys: tuple[t.ReplacedKey, ...]) -> None:
    wire = codec.replace_keys_request_to_pb(request).SerializeToString()
    assert codec.replace_keys_request_from_pb(pb.ReplaceKeysRequest.FromString(wire)) == request
    wire = codec.replaced_keys_to_pb(keys).SerializeToString()
    assert codec.replaced_keys_from_pb(pb.ReplaceKeysReply.FromString(wire)) == keys


def test_what_is_no_answer_about_keys_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match=r"change is 'melted', which this version does not know"):
        codec.replaced_keys_from_pb(pb.ReplaceKeysReply(keys=[pb.ReplacedKey(holder_id="one", change="melted")]))
    with pytest.raises(MalformedMessageError, match=r"keys.holder_id is empty"):
        codec.replaced_keys_from_pb(pb.ReplaceKeysReply(keys=[pb.ReplacedKey(change="done")]))


def test_a_phase_of_another_version_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match=r"phase is 'asleep', which this version does not know"):
        codec.service_state_from_pb(pb.ServiceState(version="1", phase="asleep"))


def test_every_call_over_a_socket(tmp_path: Path) -> None:
    fake = FakeAdmin()
    server = serve(FakeChunkService(), f"unix://{tmp_path}/s", operation=fake)
    admin = GrpcServiceAdmin(server.address)
    try:
        assert admin.state(deadline_s=5.0) == ONE
        assert admin.drain(t.DrainRequest(60.0, 1.5), deadline_s=5.0) == ONE
        assert admin.reload(deadline_s=5.0) == RELOADED
        assert admin.stacks(deadline_s=5.0) == "thread 1 main\n"
        assert admin.replace_keys(t.ReplaceKeysRequest("red", "one", 2.5), deadline_s=5.0) == REPLACED
        assert fake.calls == [t.DrainRequest(60.0, 1.5), t.ReplaceKeysRequest("red", "one", 2.5)]
    finally:
        admin.close()
        server.stop(0.0)


def test_a_service_without_it_says_so(tmp_path: Path) -> None:
    server = serve(FakeChunkService(), f"unix://{tmp_path}/s")
    admin = GrpcServiceAdmin(server.address)
    try:
        with pytest.raises(UnsupportedError, match="does not know the call State"):
            admin.state(deadline_s=5.0)
    finally:
        admin.close()
        server.stop(0.0)


def test_a_service_that_drains_is_told_from_one_that_is_gone(tmp_path: Path) -> None:
    service = FakeChunkService()
    service.failure = ServiceDrainingError("it drains", next_step="later")
    server = serve(service, f"unix://{tmp_path}/s")
    from meshfusion.dpu.api.client import GrpcChunkService

    client = GrpcChunkService(server.address)
    try:
        with pytest.raises(ServiceDrainingError, match="it drains"):
            client.status(deadline_s=5.0)
        server.stop(0.0)
        with pytest.raises(ServiceUnavailableError) as gone:
            client.status(deadline_s=5.0)
        assert not isinstance(gone.value, ServiceDrainingError)
    finally:
        client.close()
        server.stop(0.0)
