"""``mfctl sim``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.tools.mfctl import sim_command
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.sim import run as sim_run


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["sim", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [
        {"timestamp": 1000 * i, "input_length": 1536, "output_length": 1, "hash_ids": [i // 2, 50 + i // 2, 100 + i]}
        for i in range(60)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_json(trace: str) -> None:
    shown = run(trace, "--size", "10%,64MiB", "--policy", "lru,blocks,segments", "--format", "json")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report["trace"]["accesses"] == 180
    assert report["trace"]["unique_blocks"] == 120
    assert [(r["capacity_blocks"], r["policy"]) for r in report["runs"]] == [
        (12, "lru"), (12, "blocks"), (12, "segments"), (1, "lru"), (1, "blocks"), (1, "segments"),
    ]  # fmt: skip
    lru = report["runs"][0]
    assert (lru["hits"], lru["blocks_written"]) == (60, 120)
    assert lru["bytes_written"] == 120 * 512 * 128 * 1024
    assert lru["drive_writes_per_day"] == pytest.approx(120 / 12 / 59 * 86400)


def test_table(trace: str) -> None:
    shown = run(trace, "--size", "10%", "--policy", "lru,clairvoyant")
    assert shown.exit_code == 0, shown.output
    assert "60 requests in 59 s, 180 accesses to 120 blocks of 512 tokens" in shown.output
    assert shown.output.splitlines()[3].split()[:3] == ["12", "lru", "0.333"]


def test_a_bound_is_said_to_hold_for_ours_only(trace: str) -> None:
    bounded = ("--size", "50%", "--policy", "lru,blocks", "--dwpd", "3")
    shown = run(trace, *bounded)
    assert shown.exit_code == 0
    assert shown.stderr == "note: --dwpd does not bound lru, which know no budget of writes\n"
    runs = json.loads(run(trace, *bounded, "--format", "json").stdout)["runs"]
    assert [(r["policy"], r["drive_writes_per_day_allowed"]) for r in runs] == [("lru", None), ("blocks", 3.0)]
    assert run(trace, "--size", "50%", "--policy", "lru,blocks").stderr == ""
    refused = run(trace, "--policy", "lru,arc", "--dwpd", "3")
    assert refused.exit_code == 2
    assert "--dwpd bounds segments and blocks only" in refused.stderr


def test_the_names_are_those_of_the_simulator() -> None:
    assert sim_command._BOUNDED == sim_run.OURS
    assert sim_command._POLICIES == sim_run.POLICIES
    assert sim_command._DEFAULT.split(",") == list(sim_run.DEFAULT_POLICIES)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--policy", "lru,belady"), "belady"),
        (("--policy", ","), "nothing is not of"),
        (("--size", "0.1%"), "less than one block"),
        (("--size", "1%,x"), "'x' is not a size"),
        (("--bytes-per-token", "0"), "more than 0"),
        (("--dwpd", "0"), "0"),
        (("--dwpd", "nan"), "nan"),
    ],
)
def test_wrong_usage(trace: str, arguments: tuple[str, ...], word: str) -> None:
    shown = run(trace, *arguments)
    assert shown.exit_code == 2
    assert word in shown.output


def test_a_bad_line_is_told_as_json(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3, "hash_ids": [1]}\n{"timestamp": 0}\n')
    shown = run(str(path), "--format", "json")
    assert shown.exit_code == 1
    error = json.loads(shown.stderr)["error"]
    assert error["kind"] == "TraceError"
    assert f"{path}, line 2: input_length is None" in error["message"]
    assert "Write a whole number" in error["next_step"]


def test_a_missing_file(tmp_path: Path) -> None:
    shown = run(str(tmp_path / "no.jsonl"))
    assert shown.exit_code == 1
    assert "no.jsonl" in shown.output
    assert "next step" in shown.output
