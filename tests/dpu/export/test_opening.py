"""From the configuration to what is exported: a backing for each drive, and the bdevs that SPDK is to make of files."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.dpu.export.desired import Namespace
from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.opening import drop_bdev, make_bdev
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, check_bdevs, nqn_prefix_of
from meshfusion.dpu.export.spdk.client import SpdkRpc
from meshfusion.jbof.errors import ConfigError, FieldValueError

POOL = uuid.UUID(int=7)


def spdk(**options: Any) -> SpdkConfig:
    return SpdkConfig(socket=Path("/s"), memory=8 << 30, **options)


def plan_of(**options: Any) -> ExportPlan:
    named = spdk(**options).named_bdevs
    return ExportPlan(TargetKind.SPDK, nqn_prefix_of(POOL), POOL, {}, frozenset(), named_bdevs=named)


def backings(plan: ExportPlan, *numbers: int) -> dict[int, str]:
    return dict(plan.showing({number: Path(f"/d/{number}") for number in numbers}).backings)


def test_bdevs_of_files_are_named_after_the_pool_and_the_drive() -> None:
    assert backings(plan_of(), 0, 2) == {0: f"mf-{POOL}", 2: f"mf-{POOL}-2"}


def test_the_kernel_is_shown_the_drives_themselves() -> None:
    plan = ExportPlan(TargetKind.NVMET, nqn_prefix_of(POOL), POOL, {}, frozenset())
    assert backings(plan, 0, 2) == {0: "/d/0", 2: "/d/2"}


def test_bdevs_that_are_named_are_those_of_the_drives_numbers() -> None:
    assert backings(plan_of(bdev="n0"), 0) == {0: "n0"}
    assert backings(plan_of(bdev="n0", bdevs={1: "n1", 2: "n2"}), 2, 0) == {2: "n2", 0: "n0"}, "1 is away"
    assert backings(plan_of(bdevs={0: "n0", 3: "n3"}), 0, 3) == {0: "n0", 3: "n3"}


@pytest.mark.parametrize("options", [{"bdev": "n0"}, {"bdev": "n0", "bdevs": {2: "n2"}}])
def test_a_drive_without_a_bdev_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="names no bdev for drive 1 of the pool") as refused:
        check_bdevs(plan_of(**options), [0, 1])
    assert "exports.spdk.bdevs" in refused.value.next_step
    check_bdevs(plan_of(**options), [0])
    check_bdevs(plan_of(), [0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bdev": "n0", "bdevs": {0: "n1"}}, "names that of drive 0 beside bdev"),
        ({"bdev": "n0", "bdevs": {1: "n0"}}, "names a bdev twice"),
        ({"bdevs": {255: "n0"}}, "less than or equal to 254"),
    ],
)
def test_bdevs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises((FieldValueError, ValueError), match=message):
        spdk(**options)


class Rpc(SpdkRpc):
    """Answers everything alike."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def connect(self, timeout_s: float, /) -> int:
        return 1

    def close(self) -> None:
        pass

    def call(self, method: str, timeout_s: float, /, **parameters: object) -> Any:
        self.calls.append((method, parameters))
        if self.code:
            raise StepRefusedError("no", code=self.code, next_step="-")


NAMESPACE = Namespace(3, POOL, POOL.hex, "b2", "/d/2")
CREATED = ("bdev_aio_create", {"name": "b2", "filename": "/d/2", "block_size": 4096, "fallocate": True})


@pytest.mark.parametrize("code", [0, -17])
def test_a_bdev_is_made_of_a_file_whether_it_was_before_or_not(code: int) -> None:
    rpc = Rpc(code)
    make_bdev(None, rpc, NAMESPACE)
    assert rpc.calls == [CREATED]


def test_a_bdev_that_the_configuration_names_is_not_made() -> None:
    rpc = Rpc()
    make_bdev(None, rpc, replace(NAMESPACE, file=""))
    assert rpc.calls == []


def test_a_file_that_cannot_be_attached_is_told() -> None:
    with pytest.raises(StepRefusedError):
        make_bdev(None, Rpc(-22), NAMESPACE)


@pytest.mark.parametrize("code", [0, -19])
def test_a_bdev_is_dropped_whether_it_is_there_or_not(code: int) -> None:
    rpc = Rpc(code)
    drop_bdev(rpc, "b2")
    assert rpc.calls == [("bdev_aio_delete", {"name": "b2"})]


def test_a_bdev_that_cannot_be_dropped_is_told() -> None:
    with pytest.raises(StepRefusedError):
        drop_bdev(Rpc(-16), "b2")
