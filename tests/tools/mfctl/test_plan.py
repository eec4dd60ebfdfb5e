"""``mfctl plan``; its figures are in tests/tools/plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.host.kv.resume import StateAtBoundary, WholePrefix
from meshfusion.tools import model_kv
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.model_kv import EngineSettings, GroupKv, LayerKv, ModelKv
from meshfusion.tools.plan.document import sizing_document
from meshfusion.tools.plan.given import GIVEN
from meshfusion.tools.plan.plan import FORMULAS

BYTES = ("--kv-bytes-per-token", "128KiB")
WORKLOAD = (
    "--requests", "10", "--prompt-tokens", "4000", "--hit-ratio", "0.5", "--working-set", "2",
    "--prefill-rate", "20000", "--written-share", "0.5",
)  # fmt: skip
HARDWARE = (
    "--drives", "8", "--drive-size", "3.84TB", "--drive-read-rate", "6", "--drive-write-rate", "2", "--drive-dwpd",
    "5", "--nic-rate", "200", "--dpu-memory", "32GiB",
)  # fmt: skip
FULL = LayerKv("FullAttentionSpec", "full_attention", 32, "a", "every block", 16, 65_536, 65_536, 0, False)
STATE = LayerKv("MambaSpec", "recurrent_state", 3, "b", "the state", 16, 4096, 4096, 0, True)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["plan", *arguments])


def figures(result: Result) -> dict[str, Any]:
    return {figure["name"]: figure["value"] for figure in json.loads(result.stdout)["figures"]}


def model(*groups: GroupKv, refusals: tuple[str, ...] = ()) -> ModelKv:
    return ModelKv("0.32.0", "cpu", groups, 1, 1, refusals, 12.0)


def test_enough_exits_0_and_says_so() -> None:
    shown = run(*BYTES, *WORKLOAD, *HARDWARE)
    assert shown.exit_code == 0, shown.output
    assert "NOT ENOUGH" not in shown.output
    assert "not computed" not in shown.output
    lines = shown.output.splitlines()
    assert any(line.split() == ["loads", "2.62", "GB/s"] for line in lines)
    assert any(line.split() == ["KV", "of", "a", "token,", "stored", "128.0", "KiB"] for line in lines)


def test_not_enough_exits_1_with_the_next_step() -> None:
    shown = run(*BYTES, *WORKLOAD, *HARDWARE, "--drives", "1")
    assert shown.exit_code == 1
    assert "not enough: room on the drives\n  next step: Take more or larger drives" in shown.output
    body = json.loads(run(*BYTES, *WORKLOAD, *HARDWARE, "--drives", "1", "--format", "json").stdout)
    assert body["is_enough"] is False
    checks = {check["what"]: check for check in body["checks"]}
    assert not checks["room on the drives"]["is_enough"]
    assert "larger drives" in checks["room on the drives"]["next_step"]
    assert checks["loads over a port"]["next_step"] == ""


def test_json_has_every_figure_with_its_formula_and_source() -> None:
    body = json.loads(run(*BYTES, *WORKLOAD, *HARDWARE, "--format", "json").stdout)
    named = {figure["name"] for figure in body["figures"]}
    assert named == {entry.name for entry in FORMULAS}
    assert all(figure["formula"] and figure["source"] for figure in body["figures"])
    origins = {given["name"]: given["origin"] for given in body["given"]}
    assert origins["requests_per_s"] == "given"
    assert origins["rated_years"].startswith("default: the usual warranty")
    assert yaml.safe_load(run(*BYTES, *WORKLOAD, *HARDWARE, "--format", "yaml").stdout) == body


def test_what_has_no_bound_is_null_in_json() -> None:
    shown = run(*BYTES, *WORKLOAD, *HARDWARE, "--written-share", "0", "--format", "json")
    assert figures(shown)["life_months"] is None
    assert "Infinity" not in shown.stdout


def test_explain_shows_formulas_constants_and_sources() -> None:
    shown = run(*BYTES, *WORKLOAD, *HARDWARE, "--explain")
    for entry in FORMULAS:
        assert f"{entry.name} = {entry.text}" in shown.output
        assert entry.source in shown.output
    assert "INDEX_BYTES_PER_RECORD = 419" in shown.output


def test_a_model_alone_tells_its_kv_and_what_the_rest_would_take() -> None:
    shown = run(*BYTES)
    assert shown.exit_code == 0
    assert "IS IT ENOUGH" not in shown.output
    assert "figures that need --requests, --prompt-tokens, --hit-ratio, --working-set" in shown.output
    assert "the usual warranty" not in shown.output, "a default that nothing is computed with"
    assert "cores of nvmf_tgt" in shown.output


def test_a_segment_size_that_is_given_is_shown_as_given() -> None:
    body = json.loads(run(*BYTES, *HARDWARE, "--segment-size", "256MiB", "--format", "json").stdout)
    assert {given["name"]: given["value"] for given in body["given"]}["segment_bytes"] == 256 << 20
    assert "segment_bytes" not in {figure["name"] for figure in body["figures"]}


def test_a_model_is_described_as_its_engine_would_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def describe(folder: Path, settings: EngineSettings) -> ModelKv:
        asked.append((folder, settings))
        return model(GroupKv((FULL,), (), WholePrefix()))

    monkeypatch.setattr(model_kv, "describe_model", describe)
    shown = run(
        str(tmp_path), "--tensor-parallel-size", "2", "--block-size", "32", "--dtype", "bfloat16", "--kv-cache-dtype",
        "fp8", "--max-model-len", "8192", "--format", "json",
    )  # fmt: skip
    assert asked == [(tmp_path, EngineSettings(2, 32, "bfloat16", "fp8", 8192))]
    assert figures(shown)["kv_bytes_per_token"] == 2 * 32 * 65_536 / 16
    (group,) = json.loads(shown.stdout)["model"]["groups"]
    assert group["rule"] == {"class": "WholePrefix"}
    about_blocks, not_as_asked = json.loads(shown.stdout)["notes"]
    assert "vLLM 0.32.0 for cpu" in about_blocks
    assert not_as_asked == "vLLM 0.32.0 for cpu makes blocks of 16 tokens, not of 32"


def test_a_platform_that_caches_no_prefixes_is_a_note_and_states_are_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = model(
        GroupKv((FULL,), (), WholePrefix()), GroupKv((STATE,), (), StateAtBoundary()), refusals=("no prefixes; go",)
    )
    monkeypatch.setattr(model_kv, "describe_model", lambda folder, settings: found)
    shown = run(str(tmp_path))
    assert shown.exit_code == 0
    assert "note: vLLM 0.32.0 for cpu: no prefixes; go" in shown.output
    assert "note: of states a snapshot is counted for each chunk" in shown.output


def test_a_model_that_is_not_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = model(GroupKv((FULL,), ("a spec that is not known; leave it",)))
    monkeypatch.setattr(model_kv, "describe_model", lambda folder, settings: refused)
    shown = run(str(tmp_path))
    assert shown.exit_code == 1
    assert "KV group 0 is not served: a spec that is not known; leave it" in shown.stderr
    assert "next step: " in shown.stderr


def test_a_folder_that_is_not_there() -> None:
    shown = run("some-org/Some-Model")
    assert shown.exit_code == 1
    assert "download it first" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Name either the folder of a MODEL or --kv-bytes-per-token."),
        ((".", *BYTES), "Name either the folder of a MODEL or --kv-bytes-per-token."),
        ((".", "--replicated"), "--replicated is for --kv-bytes-per-token"),
        ((*BYTES, "--hit-ratio", "1.1"), "--hit-ratio"),
        ((*BYTES, "--drives", "0"), "--drives"),
        ((*BYTES, "--drive-size", "3.84 parsecs"), "--drive-size"),
        ((*BYTES, "--drive-read-rate", "nan"), "--drive-read-rate"),
        ((*BYTES, "--nic-rate", "inf"), "--nic-rate"),
        ((*BYTES, "--prefill-rate", "0"), "--prefill-rate"),
        ((*BYTES, "--device-waf", "0.9"), "--device-waf"),
        ((*BYTES, "--free-fraction", "0.6"), "--free-fraction"),
        ((*BYTES, "--chunk-min-bytes", "1KiB"), "is not from 4KiB to 1GiB"),
        ((*BYTES, "--trace", "a.jsonl"), "--trace needs a pool"),
        ((*BYTES, "--trace", "a.jsonl", "--hit-ratio", "0.5", "--working-set", "2"), "leave that out, or the trace"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert said in shown.output


# ---- traces ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Every prompt of three blocks is asked twice: half of the accesses can be hits."""
    lines = [
        {"timestamp": 1000 * i, "input_length": 1536, "output_length": 1,
         "hash_ids": [3 * (i // 2), 3 * (i // 2) + 1, 3 * (i // 2) + 2]}
        for i in range(400)
    ]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_a_trace_on_drives(trace: str) -> None:
    shown = run(*BYTES, *HARDWARE, "--trace", trace, "--format", "json")
    assert shown.exit_code == 0, shown.output
    body = json.loads(shown.stdout)
    given = {entry["name"]: entry for entry in body["given"]}
    assert given["prompt_tokens"]["value"] == 1536
    assert given["requests_per_s"]["value"] == pytest.approx(400 / 399)
    assert 0 < given["hit_ratio"]["value"] <= 0.5
    assert given["hit_ratio"]["origin"] == "from the trace"
    assert given["rewrite_share"]["value"] == 0, "all of it fits"
    assert any("simulated" in note for note in body["notes"])


def test_the_pool_for_hits_that_are_wanted(trace: str) -> None:
    shown = run(*BYTES, "--trace", trace, "--hit-ratio", "0.2", "--requests", "100", "--format", "json")
    body = json.loads(shown.stdout)
    given = {entry["name"]: entry for entry in body["given"]}
    assert given["hit_ratio"]["value"] >= 0.2
    assert given["requests_per_s"]["origin"] == "given"
    needed = figures(shown)["needed_bytes"]
    all_blocks = 600 * 512 * (16 * 131_072 + 4096) / 16 * 100 / (400 / 399)
    assert 0.009 * all_blocks < needed <= 2.01 * all_blocks
    explained = run(*BYTES, "--trace", trace, "--hit-ratio", "0.2", "--explain")
    assert "needed_bytes: found on the trace" in explained.output


def test_hits_that_a_trace_does_not_have(trace: str) -> None:
    shown = run(*BYTES, "--trace", trace, "--hit-ratio", "0.9")
    assert shown.exit_code == 1
    assert "are not to be had at any size" in shown.stderr


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "a.jsonl"
    bad.write_text("{")
    shown = run(*BYTES, *HARDWARE, "--trace", str(bad))
    assert shown.exit_code == 1
    assert "line 1" in shown.stderr


# ---- the document ------------------------------------------------------------------------------------------------


def test_the_document_has_every_formula_and_every_option() -> None:
    text = sizing_document()
    for entry in FORMULAS:
        assert f"`{entry.name} = " in text
    for given in GIVEN:
        assert f"| `{given.option}` | `{given.name}` |" in text
    assert "form_of_bytes" not in text


def test_the_line_in_the_document_is_one_that_is_taken() -> None:
    """But for the model's folder."""
    _, _, rest = sizing_document().partition("mfctl plan MODEL_FOLDER ")
    line, _, _ = rest.partition("```")
    arguments = line.replace("\\\n", " ").split()
    shown = run(*BYTES, *arguments)
    assert shown.exit_code == 1
    assert "NOT ENOUGH" in shown.output
    assert "not computed" not in shown.output
