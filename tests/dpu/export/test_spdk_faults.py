"""Single faults of SPDK that the suite for both targets cannot bring about."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.export.desired import Export, Host, HostKey
from meshfusion.dpu.export.fence import Confirmed, NotYet
from meshfusion.dpu.export.layout import Tenant
from meshfusion.dpu.export.spdk.sizing import MIB, Machine, size
from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget
from meshfusion.dpu.export.steps import RemoveNamespace
from tests.dpu.export.cases import PREFIX, A, B, export, host_nqn, nqn_of, tenant
from tests.dpu.export.fake_rpc import FakeRpc
from tests.dpu.export.test_spdk_target import attach

SETTINGS = SpdkSettings(size(Machine(memory_bytes=400 * MIB, cores=1)), frozenset({"tcp"}), attach)


@pytest.fixture
def rpc() -> FakeRpc:
    return FakeRpc()


@pytest.fixture
def target(rpc: FakeRpc) -> SpdkTarget:
    return SpdkTarget(rpc, SETTINGS, Export(PREFIX))


def refuse(rpc: FakeRpc, method: str, fault: str = "refuse", times: int = 1000) -> None:
    left = [fault] * times
    rpc.interfere = lambda called: left.pop() if called == method and left else ""


def hosts_of(rpc: FakeRpc, name: str) -> set[str]:
    assert rpc.process is not None
    return set(rpc.process.subsystems[nqn_of(name)].hosts)


def test_a_fence_whose_removal_is_refused_is_not_confirmed(rpc: FakeRpc, target: SpdkTarget) -> None:
    target.desire(export(A))
    refuse(rpc, "nvmf_subsystem_remove_host")
    assert target.fence(host_nqn("a-1")) == NotYet(f"{nqn_of('a')} still allows {host_nqn('a-1')}")
    refuse(rpc, "nothing")
    assert target.fence(host_nqn("a-1")) == Confirmed()


@pytest.mark.parametrize("fault", ["lose request", "lose answer"])
@pytest.mark.parametrize("method", ["nvmf_subsystem_remove_host", "nvmf_subsystem_get_qpairs", "nvmf_get_subsystems"])
def test_a_fence_is_not_confirmed_by_silence(rpc: FakeRpc, target: SpdkTarget, method: str, fault: str) -> None:
    target.desire(export(A))
    refuse(rpc, method, fault, times=1)
    assert target.fence(host_nqn("a-1")) == NotYet("SPDK did not answer")
    assert target.fence(host_nqn("a-1")) == Confirmed()


def test_a_target_that_restarted_gets_the_fence_again_before_it_is_confirmed(rpc: FakeRpc, target: SpdkTarget) -> None:
    target.desire(export(A))
    refuse(rpc, "nvmf_subsystem_remove_host", "restart", times=1)
    assert isinstance(target.fence(host_nqn("a-1")), NotYet)
    rpc.calls.clear()
    assert target.fence(host_nqn("a-1")) == Confirmed()
    admitted = [parameters["host"] for method, parameters in rpc.calls if method == "nvmf_subsystem_add_host"]
    assert admitted == [host_nqn("a-2")]


def test_a_failed_step_stops_its_subsystem_and_no_other(rpc: FakeRpc, target: SpdkTarget) -> None:
    target.desire(export(A, B))
    refuse(rpc, "nvmf_subsystem_remove_ns")
    report = target.desire(export(tenant("a", "a1", "a-1 a-3"), tenant("b", "b0 b1", "b-1 b-2")))
    assert [failure.step for failure in report.failures] == [RemoveNamespace(nqn_of("a"), 1)]
    assert hosts_of(rpc, "a") == {host_nqn("a-1")}, "a-3 would get a namespace that should be gone"
    assert hosts_of(rpc, "b") == {host_nqn("b-1"), host_nqn("b-2")}


def test_a_key_is_left_from_a_step_whose_answer_was_lost(rpc: FakeRpc, target: SpdkTarget) -> None:
    keyed = Tenant("a", A.namespaces, frozenset({Host(host_nqn("a-1"), HostKey(Path("/keys/a-1"), "1" * 16))}))
    refuse(rpc, "nvmf_subsystem_add_host", "lose request", times=1)
    assert target.desire(export(keyed)).unreachable is not None
    assert rpc.process is not None
    assert list(rpc.process.keys.values()) == ["/keys/a-1"]
    assert target.reconcile().converged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": {"version": "SPDK v25.05", "fields": {"major": 25}}}, "this is SPDK v25.05; tested is SPDK 26"),
        ({"methods": ["spdk_get_version"]}, "lacks the methods .*nvmf_subsystem_get_qpairs"),
    ],
)
def test_what_is_not_known_is_refused(rpc: FakeRpc, target: SpdkTarget, change: dict[str, Any], message: str) -> None:
    assert rpc.process is not None
    if "version" in change:
        rpc.process.version = change["version"]
    if "methods" in change:
        rpc.process.methods = change["methods"]
    report = target.desire(export(A))
    assert report.unreachable is not None
    assert re.search(message, report.unreachable.message)
    assert not rpc.process.started, "nothing is done to it"


def test_a_transport_that_is_too_small_is_reported(rpc: FakeRpc, target: SpdkTarget) -> None:
    rpc.connect(1.0)
    rpc.call("framework_start_init", 1.0)
    rpc.call("nvmf_create_transport", 1.0, trtype="TCP", max_io_size=131072)
    report = target.desire(export(A))
    assert "takes I/O of 131072 bytes, not 1048576" in report.reasons[0]
    larger = replace(SETTINGS, sizing=replace(SETTINGS.sizing, max_io_bytes=131072))
    assert SpdkTarget(rpc, larger, Export(PREFIX)).desire(export(A)).converged


def test_iobuf_pools_are_set_before_the_start(rpc: FakeRpc, target: SpdkTarget) -> None:
    target.desire(export(A))
    methods = [method for method, _ in rpc.calls]
    assert methods.index("iobuf_set_options") < methods.index("framework_start_init")
    assert rpc.process is not None
    assert rpc.process.iobuf_options == SETTINGS.sizing.iobuf_options()
