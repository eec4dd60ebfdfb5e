"""The arithmetic of the benchmarks' reports. No benchmark runs here."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfusion.tools.bench import kv_kinds
from meshfusion.tools.bench.machine import machine_facts
from meshfusion.tools.bench.processes import memory_of, session_processes
from meshfusion.tools.bench.report import Report
from meshfusion.tools.bench.scheduler_time import figures_of


def test_ratio_is_of_medians_and_round_by_round() -> None:
    report = Report("name", {}, {})
    report.compare(report.add("ours", "s", [1.0, 4.0, 2.0]), report.add("theirs", "s", [2.0, 4.0, 8.0]))
    (ratio,) = report.ratios
    assert ratio.of_medians == pytest.approx(2.0 / 4.0)
    assert ratio.pairwise == pytest.approx((0.5, 1.0, 0.25))


def test_json_holds_every_sample_and_the_medians() -> None:
    report = Report("name", {"cpu": "x"}, {"rounds": 3})
    report.add("ours", "s", [3.0, 1.0, 2.0])
    body = json.loads(report.to_json())
    assert body["series"] == [{"name": "ours", "unit": "s", "samples": [3.0, 1.0, 2.0], "median": 2.0}]
    assert body["machine"] == {"cpu": "x"}


def test_idle_steps_do_not_flatter_the_busy_ones() -> None:
    busy = [{"scheduled_tokens": 1, "step_ns": 100_000, "cpu_ns": 50_000}]
    idle = [{"scheduled_tokens": 0, "step_ns": 1_000, "cpu_ns": 1_000}] * 99
    figures = figures_of(busy + idle)
    assert figures["busy steps p50"] == pytest.approx(100.0)
    assert figures["busy steps max"] == pytest.approx(100.0)
    assert figures["all steps p50"] == pytest.approx(1.0)
    assert figures["all steps max"] == pytest.approx(100.0)


def test_memory_counts_what_is_touched() -> None:
    before = memory_of()
    # Mapped anew: what malloc gives may be memory that an earlier test has touched and freed.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        after = memory_of()
    assert after.anonymous_bytes - before.anonymous_bytes == pytest.approx(64 << 20, rel=0.1)
    assert after.uss_bytes <= after.pss_bytes <= after.rss_bytes


def test_session_holds_this_process() -> None:
    processes = session_processes(os.getsid(0))
    assert "python" in processes[os.getpid()] or "pytest" in processes[os.getpid()]


def test_machine_facts_name_the_filesystem(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert facts["cpu"]
    assert int(facts["cores"]) >= 1
    kind, on, source = facts["filesystem"].split(maxsplit=2)
    assert kind != "unknown"
    assert (on, bool(source)) == ("on", True)


def test_kv_kinds_says_at_once_which_folder_has_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_kinds, "verified", None)  # no engine is started
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    arguments = [str(tmp_path / "good"), str(tmp_path / "bare"), "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(kv_kinds.main, arguments)
    assert result.exit_code == 1
    assert f"{tmp_path}/bare is not a usable model folder: it has no config.json" in result.stderr
