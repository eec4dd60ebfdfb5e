"""What the quickstart prints, given how its engines did."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshfusion.tools import quickstart
from meshfusion.tools.quickstart import Outcome, _step, cli

OUTCOME = Outcome(
    model="[red]model[/blue]",
    prompt_tokens=4097,
    ttft_cold_s=4.0,
    ttft_warm_s=0.1,
    speedup=40.0,
    tokens_reused=4096,
    bytes_saved=10**8,
    bytes_loaded=10**8,
    load_s=0.05,
    load_gb_per_s=2.0,
    tokens_identical=True,
    logprob_difference_max=0.0,
    cold_tokens_identical=True,
    pool="",
)


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome) -> Outcome:
    """The engines replaced by what they would have led to."""
    outcome = replace(outcome, pool=str(tmp_path / "pool"))
    monkeypatch.setattr(quickstart, "CACHE", tmp_path)
    monkeypatch.setattr(quickstart, "_run_phases", lambda *_: outcome)
    return outcome


def test_table_says_what_was_compared_and_where_the_pool_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, tmp_path, OUTCOME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    assert cli([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "[red]model[/blue], 4097 tokens of prompt" in lines[0]
    assert any("yes, as from the first engine's own prefix cache" in line for line in lines)
    assert lines[-1].endswith(" venv/bin/mfctl chunk list pool")


@pytest.mark.parametrize("bad", [{"tokens_identical": False}, {"tokens_reused": 0}])
def test_failed_run_prints_its_result_and_one_error(
    bad: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = pretend(monkeypatch, tmp_path, replace(OUTCOME, **bad))
    assert cli(["--format", "json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == asdict(outcome)
    assert json.loads(printed.err)["error"]["next_step"]


def test_step_is_announced_without_a_terminal_in_whole_lines() -> None:
    printed = StringIO()
    name = "reading [b]" + "long " * 30
    with _step(Console(file=printed, width=80), name) as note:
        assert printed.getvalue() == f"… {name}\n"
        note("[/i]")
    assert printed.getvalue().splitlines()[1].startswith(f"✓ {name} (0.")
