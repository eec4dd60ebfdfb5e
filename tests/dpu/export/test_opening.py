"""From the configuration to what is exported: a backing for each drive, and the bdevs that SPDK is to make of files."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.dpu.export.opening import check_target
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, check_bdevs, nqn_prefix_of
from meshfusion.jbof.errors import ConfigError, FieldValueError, UnsupportedError

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


WITHOUT_SPDK = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "spdk":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def test_a_service_without_the_package_of_spdk_starts() -> None:
    """It is in an extra of its own: exports over the kernel, or none, need nothing of it."""
    code = (
        WITHOUT_SPDK
        + "import meshfusion.dpu.export.nvmet.target, meshfusion.tools.mfctl.daemon as daemon\nprint(daemon)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "meshfusion.tools.mfctl.daemon" in done.stdout, done.stderr


def test_without_the_package_of_spdk_its_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="needs the Python package spdk"):
        check_target("spdk")
