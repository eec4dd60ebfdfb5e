"""Limits of a pool's bdevs: set on each connection, in SPDK's units, and left alone where they are right."""

from __future__ import annotations

from typing import Any

import pytest

from meshfusion.dpu.export.desired import Export
from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.opening import attach_drives
from meshfusion.dpu.export.spdk.rate_limits import RateLimits, keep_limits
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.dpu.export.spdk.sizing import MIB, Machine, size
from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget
from meshfusion.jbof.errors import UnsupportedError
from tests.dpu.export.cases import A, export
from tests.dpu.export.fake_rpc import FakeRpc
from tests.dpu.export.fake_spdk import FakeSpdk

LIMITS = RateLimits(read_bytes_per_s=2048 * MIB, write_bytes_per_s=500 * MIB)


def target_of(rpc: FakeRpc, limits: RateLimits | None) -> SpdkTarget:
    def attach(rpc: SpdkRpc) -> None:
        there = {bdev["name"] for bdev in rpc.call("bdev_get_bdevs", 1.0)}
        for name in {"a0", "a1", "b0"} - there:
            rpc.call("bdev_malloc_create", 1.0, name=name, num_blocks=1, block_size=4096)
        attach_drives({}, ("a0", "a1"), limits, rpc)

    settings = SpdkSettings(size(Machine(400 * MIB, 1, connections=4)), frozenset({"tcp"}), attach)
    return SpdkTarget(rpc, settings, Export("nqn.2026-11.io.meshfusion:test"))


def set_calls(rpc: FakeRpc) -> list[dict[str, Any]]:
    return [parameters for method, parameters in rpc.calls if method == "bdev_set_qos_limit"]


def process(rpc: FakeRpc) -> FakeSpdk:
    assert rpc.process is not None
    return rpc.process


def test_each_drive_of_the_pool_is_limited_and_again_after_a_restart() -> None:
    rpc = FakeRpc()
    target = target_of(rpc, LIMITS)
    for _ in range(2):
        while not target.desire(export(A)).converged:
            pass
        limits = {"r_mbytes_per_sec": 2048, "w_mbytes_per_sec": 500}
        assert process(rpc).rate_limits == {"a0": limits, "a1": limits}, "b0 is another pool's"
        rpc.process = FakeSpdk()


def test_limits_are_there_before_a_host_is_let_in() -> None:
    rpc = FakeRpc()
    rpc.interfere = lambda method: "refuse" if method == "bdev_set_qos_limit" else ""
    report = target_of(rpc, LIMITS).desire(export(A))
    assert report.unreachable is not None
    assert "bdev_set_qos_limit" in report.unreachable.message
    assert process(rpc).reachable() == set()


def test_what_is_as_it_should_be_is_left_alone_and_what_is_not_configured_taken_away() -> None:
    rpc = FakeRpc()
    rpc.connect(1.0)
    spdk = process(rpc)
    spdk.started, spdk.bdevs = True, ["a0"]
    keep_limits(rpc, ["a0"], RateLimits())
    assert set_calls(rpc) == []
    keep_limits(rpc, ["a0"], LIMITS)
    keep_limits(rpc, ["a0"], LIMITS)
    assert set_calls(rpc) == [{"name": "a0", "r_mbytes_per_sec": 2048, "w_mbytes_per_sec": 500}]
    spdk.rate_limits["a0"]["rw_ios_per_sec"] = 7000  # an operator's own, of a kind that is not ours
    keep_limits(rpc, ["a0"], RateLimits(write_bytes_per_s=MIB))
    assert spdk.rate_limits["a0"] == {"r_mbytes_per_sec": 0, "w_mbytes_per_sec": 1, "rw_ios_per_sec": 7000}


def test_a_service_of_one_pool_does_not_touch_limits() -> None:
    rpc = FakeRpc()
    while not target_of(rpc, None).desire(export(A)).converged:
        pass
    assert set_calls(rpc) == []


@pytest.mark.parametrize("answer", [[], [{}], [{"assigned_rate_limits": {}}], "no", [{"assigned_rate_limits": None}]])
def test_an_answer_of_another_form_is_refused(answer: Any) -> None:
    class Rpc(FakeRpc):
        def call(self, method: str, timeout_s: float, /, **parameters: Any) -> Any:
            return answer

    with pytest.raises(UnsupportedError, match="in a form that is not known"):
        keep_limits(Rpc(), ["a0"], LIMITS)


def test_a_bdev_that_is_not_there_is_told() -> None:
    rpc = FakeRpc()
    rpc.connect(1.0)
    process(rpc).started = True
    with pytest.raises(StepRefusedError, match="No such device"):
        keep_limits(rpc, ["a0"], LIMITS)
