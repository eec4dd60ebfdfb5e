"""``mfctl verify`` around the engines: what it starts them with, what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.verify_command import parse_engine_options
from meshfusion.tools.verify import run
from meshfusion.tools.verify.prompts import Prompt
from tests.tools.verify.cases import answer, loaded, own

FACTS: dict[str, Any] = {
    "versions": {"meshfusion": "1", "vllm": "0.32.0", "torch": "2", "python": "3.11"},
    "platform": "cpu", "device": "a machine", "dtype": "float32", "identity": "ab" * 32, "chunk_tokens": 128,
    "vocabulary": 8192, "context_tokens": 4096,
    "groups": [
        {"spec": "S", "needs": "every block", "layers": 4, "block_tokens": 32, "block_bytes": 4096, "is_loaded": True}
    ],
}  # fmt: skip


class FakeEngines:
    """In place of both halves: ``digest`` of the one block that is loaded; ``1`` was computed."""

    def __init__(self) -> None:
        self.plans: list[run.Plan] = []
        self.digest = "1"
        self.shift = 0.0
        self.second_facts = FACTS

    def compute(self, plan: run.Plan, note: Any) -> run.Computed:
        self.plans.append(plan)
        return run.Computed(
            FACTS, (Prompt("p", (1,) * 129),), (own(7, shift=self.shift),), [{"a": ["1"]}], {"saved_bytes": 5}
        )

    def load(self, plan: run.Plan, prompts: Any, note: Any) -> run.Loaded:
        self.plans.append(plan)
        (plan.work / "pool").mkdir()
        (plan.work / "second.log").touch()
        answers = (loaded(answer(7, cached=128), [("a", self.digest)]),)
        return run.Loaded(self.second_facts, answers, {"loaded_bytes": 5}, "path staged: possible")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngines:
    fake = FakeEngines()
    monkeypatch.setattr(run, "compute", fake.compute)
    monkeypatch.setattr(run, "load", fake.load)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def verify(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["verify", "--model", str(model), *arguments])


def kept(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("mfctl-verify-*"))


def test_what_passes_exits_0_and_leaves_nothing(engines: FakeEngines, model: Path, tmp_path: Path) -> None:
    result = verify(model, "--format", "json", "--seed", "5")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["is_passed"] is True
    assert (report["identity"], report["path"], report["seed"]) == ("ab" * 32, "path staged: possible", 5)
    assert report["prompts"][0]["loaded_blocks"] == report["prompts"][0]["compared_blocks"] == 1
    assert (report["saver_counts"], report["loader_counts"]) == ({"saved_bytes": 5}, {"loaded_bytes": 5})
    assert not kept(tmp_path)


def test_a_difference_exits_1_names_it_and_keeps_the_evidence(
    engines: FakeEngines, model: Path, tmp_path: Path
) -> None:
    engines.digest = "2"
    result = verify(model)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "problem: p: 1 of 1 loaded blocks hold other bytes than were computed" in result.stdout
    (folder,) = kept(tmp_path)
    assert f"kept for a report: {folder}" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "second.log"], "and not the pool"
    assert json.loads((folder / "report.json").read_text())["prompts"][0]["differing_blocks"] == 1


def test_the_pool_of_what_failed_is_kept_where_that_is_asked_for(
    engines: FakeEngines, model: Path, tmp_path: Path
) -> None:
    engines.digest = "2"
    verify(model, "--keep-pool")
    (folder,) = kept(tmp_path)
    assert (folder / "pool").is_dir()


def test_what_log_probabilities_do_not_prove_is_told(engines: FakeEngines, model: Path) -> None:
    engines.shift = 0.5
    told = "the engine's own answers differ by 0.5, so log-probabilities prove little here"
    result = verify(model)
    assert result.exit_code == 0
    assert f"notice: {told}" in result.stdout
    assert json.loads(verify(model, "--format", "json").stdout)["notices"][0].startswith(told)


def test_two_engines_that_are_not_the_same_are_not_compared(engines: FakeEngines, model: Path) -> None:
    engines.second_facts = {**FACTS, "identity": "cd" * 32}
    result = verify(model)
    assert result.exit_code == 1
    assert "another identity" in result.stderr


def test_both_engines_get_the_same_options_and_see_every_hit(engines: FakeEngines, model: Path) -> None:
    verify(model, "--engine-option", "dtype=float32", "--engine-option", "max-num-seqs=4", "--max-model-len", "777")
    first, second = engines.plans
    assert first is second
    expected = {"model": str(model), "dtype": "float32", "max_num_seqs": 4, "max_model_len": 777}
    assert expected.items() <= first.options.items()
    extra = first.options["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {
        "pool": {"path": str(first.work / "pool"), "size": "4GiB"}, "load_always": True, "lookup_deadline_ms": 5000,
    }  # fmt: skip


def test_the_connectors_own_configuration_is_used(engines: FakeEngines, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "connector.json"
    file.write_text(json.dumps({"service": "unix:///run/m.sock", "path": "rdma", "lookup_deadline_ms": 20}))
    assert verify(model, "--connector", str(file)).exit_code == 0
    extra = engines.plans[0].options["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {
        "service": "unix:///run/m.sock", "path": "rdma", "load_always": True, "lookup_deadline_ms": 5000,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"service": "unix:///run/m.sock", "on_unsupported": "serve_without_cache"}, "without the connector"),
        ({"service": "unix:///run/m.sock", "pfad": "rdma"}, "pfad"),
    ],
)
def test_a_configuration_that_proves_nothing_is_refused(
    engines: FakeEngines, model: Path, tmp_path: Path, content: dict[str, str], said: str
) -> None:
    file = tmp_path / "connector.json"
    file.write_text(json.dumps(content))
    result = verify(model, "--connector", str(file))
    assert result.exit_code == 1
    assert said in result.stderr
    assert not engines.plans


def test_engine_options_are_json_or_text() -> None:
    given = ["dtype=bfloat16", "enforce_eager=true", 'hf_overrides={"a": 1}', "--block-size=32", "revision="]
    assert parse_engine_options(given) == {
        "dtype": "bfloat16", "enforce_eager": True, "hf_overrides": {"a": 1}, "block_size": 32, "revision": "",
    }  # fmt: skip


@pytest.mark.parametrize("given", ["dtype", "=1", "a b=1", "model=other", "kv-transfer-config={}"])
def test_other_engine_options_are_wrong_usage(given: str) -> None:
    with pytest.raises(click.UsageError):
        parse_engine_options([given])


def test_several_ranks_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = ["--model", str(tmp_path), "--engine-option", "tensor_parallel_size=2"]
    done = CliRunner().invoke(mfctl, ["verify", *arguments])
    assert done.exit_code == 1
    assert "tensor_parallel_size" in done.stderr
