"""``mfctl kinds``; the engine's child process is in tests/tools/test_model_kv.py."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.host.kv.kinds import KINDS
from meshfusion.tools import model_kv
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.model_kv import GroupKv, LayerKv, ModelKv
from tests.tools.test_engine_surface import MODULES, write_wheel

FULL = LayerKv("FullAttentionSpec", "full_attention", 2, "layers.0", "every block", 16, 1600, 2048, 0, False)
STATE = LayerKv("MambaSpec", "recurrent_state", 1, "layers.1", "the state", 256, 4096, 8192, 0, True)
MODEL = ModelKv("0.32.0", "cpu", (GroupKv((FULL,), ()), GroupKv((STATE,), ())), 2_000_000, 1_000_000, (), 12.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["kinds", *arguments])


def test_the_table() -> None:
    shown = run()
    assert shown.exit_code == 0
    for kind in KINDS:
        assert kind.what in shown.output
        assert kind.why in shown.output
        assert kind.unserved in shown.output
    listed = json.loads(run("--format", "json").output)["kinds"]
    assert [item["name"] for item in listed] == [kind.name for kind in KINDS]


def test_a_wheel_with_news_exits_1(tmp_path: Path) -> None:
    wheel = str(write_wheel(tmp_path / "a.whl", MODULES))
    shown = run("--wheel", wheel)
    assert shown.exit_code == 1
    assert "vllm.models.new.NewSpec" in shown.output
    assert "NOT KNOWN" in shown.output
    found = json.loads(run("--wheel", wheel, "--format", "json").output)
    assert found["unclassified"] == ["vllm.models.new.NewSpec"]
    assert not found["is_known"]
    assert {"section": "spec fields", "name": "vllm.models.new.NewSpec.gap", "change": "new", "was": "",
            "now": "int = 3"} in found["differences"]  # fmt: skip


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_kv, "describe_model", lambda folder: MODEL)
    shown = run("--model", str(tmp_path), "--link-rate", "1", "--device-rate", "1")
    assert shown.exit_code == 0
    assert "200 per token" in shown.output
    assert "4096 per state" in shown.output
    assert "KIND SERVED" in shown.output
    assert "the engine may still be refused at its start, on CPUs MLA is: `mfctl verify" in shown.output
    assert "does offloading pay: yes; it pays from a shared prefix of 3 tokens on" in shown.output


def test_what_is_no_wheel_is_one_error_with_a_next_step(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bare.whl", "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    cases = {"absent.whl": "does not exist", ".": "is a folder", "bare.whl": "has no metadata of vLLM"}
    for name, said in cases.items():
        shown = run("--wheel", str(tmp_path / name))
        assert shown.exit_code == 1
        assert f"{tmp_path / name} {said}" in shown.stderr
        assert "Name a wheel of vLLM" in shown.stderr
        assert len(shown.stderr.splitlines()) == 2, "the error and its next step"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("some-org/Some-Model-7B", "download it first, then name its folder"),
        ("./absent", "Name a folder with the config.json"),
        ("/absent/folder", "Name a folder with the config.json"),
    ],
)
def test_a_model_that_is_not_here(model: str, said: str) -> None:
    shown = run("--model", model)
    assert shown.exit_code == 1
    assert "does not exist" in shown.stderr
    assert said in shown.stderr


def test_a_model_that_is_refused_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ModelKv("0.32.0", "cpu", (GroupKv((STATE,), ("no snapshots; change it",)),), 1, 1, ("no cache; no",), 1.0)
    monkeypatch.setattr(model_kv, "describe_model", lambda folder: refused)
    shown = run("--model", str(tmp_path))
    assert shown.exit_code == 0
    assert "not served: no cache; no" in shown.output
    assert "group 0 not served: no snapshots; change it" in shown.output
    assert "does offloading pay: no; nothing is offloaded" in shown.output
    result = CliRunner().invoke(mfctl, ["kinds", "--model", str(tmp_path), "--format", "json"])
    found = json.loads(result.stdout)
    assert (found["are_kinds_served"], found["pays"]) == (False, False)


def test_one_question_at_a_time(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a.whl", MODULES)
    shown = run("--wheel", str(wheel), "--model", str(tmp_path))
    assert shown.exit_code == 2
    assert "exclude each other" in shown.output


@pytest.mark.parametrize("rate", ["nan", "inf", "0", "-1"])
@pytest.mark.parametrize("option", ["--link-rate", "--device-rate"])
def test_a_rate_is_a_number_above_0(tmp_path: Path, option: str, rate: str) -> None:
    shown = run("--model", str(tmp_path), option, rate)
    assert shown.exit_code == 2
    assert option in shown.output
