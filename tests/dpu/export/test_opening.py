"""From the configuration to what is exported: a backing for each drive, and the bdevs that SPDK is to make of files."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.opening import attach_files, bdevs_of, check_target
from meshfusion.jbof.errors import ConfigError, FieldValueError, UnsupportedError

POOL = uuid.UUID(int=7)


def spdk(**options: Any) -> SpdkConfig:
    return SpdkConfig(socket=Path("/s"), memory=8 << 30, **options)


def test_bdevs_of_files_are_named_after_the_pool_and_the_drive() -> None:
    assert bdevs_of(spdk(), POOL, [0, 2]) == {0: f"mf-{POOL}", 2: f"mf-{POOL}-2"}


def test_bdevs_that_are_named_are_those_of_the_drives_numbers() -> None:
    assert bdevs_of(spdk(bdev="n0"), POOL, [0]) == {0: "n0"}
    assert bdevs_of(spdk(bdev="n0", bdevs={1: "n1", 2: "n2"}), POOL, [2, 0]) == {2: "n2", 0: "n0"}, "1 is away"
    assert bdevs_of(spdk(bdevs={0: "n0", 3: "n3"}), POOL, [0, 3]) == {0: "n0", 3: "n3"}


@pytest.mark.parametrize("options", [{"bdev": "n0"}, {"bdev": "n0", "bdevs": {2: "n2"}}])
def test_a_drive_without_a_bdev_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="names no bdev for drive 1 of the pool") as refused:
        bdevs_of(spdk(**options), POOL, [0, 1])
    assert "exports.spdk.bdevs" in refused.value.next_step


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


class Rpc:
    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, timeout_s: float, **parameters: Any) -> None:
        self.calls.append((method, parameters))
        if self.code:
            raise StepRefusedError("no", code=self.code, next_step="-")


FILES = {"b0": "/d/0", "b1": "/d/1"}


@pytest.mark.parametrize("code", [0, -17])
def test_each_file_is_attached_whether_it_was_before_or_not(code: int) -> None:
    rpc = Rpc(code)
    attach_files(FILES, rpc)
    assert rpc.calls == [
        ("bdev_aio_create", {"name": name, "filename": file, "block_size": 4096, "fallocate": True})
        for name, file in FILES.items()
    ]


def test_a_file_that_cannot_be_attached_is_told() -> None:
    with pytest.raises(StepRefusedError):
        attach_files(FILES, Rpc(-22))


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
