"""What the connector costs the scheduler, a step: pool in another process, or embedded in the engine's.

The forward pass only waits, as if a device computed it; in the form "shared cores" it is computed on the scheduler's
cores and through its caches, which makes every line of Python there several times as slow, ours and the engine's. The
form "churn" has answers so short that a request begins or ends in nearly every step; "by hook" times each hook.

Steps that scheduled no tokens (an engine that only waits for lookups and loads) are reported apart: they are many and
cheap, and would make the percentiles look better than what a busy scheduler sees.
"""

from __future__ import annotations

import json
import select
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.bench.engines import POOL_SIZE, connector, running_service
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.bench.scheduler_engine import WorkloadTask
from meshfusion.tools.bench.tiny_llama import make_tiny_llama
from meshfusion.tools.engine_process import reporting_process

SERVICE, EMBEDDED, SHARED_CORES, CHURN = "service", "embedded", "service, shared cores", "service, churn"
PROFILE = "service, by hook"
FORMS = (SERVICE, EMBEDDED, SHARED_CORES, CHURN, PROFILE)
CHURN_ANSWER_TOKENS_MAX = 12  # a request begins or ends in nearly every step
FORWARD_US_PER_TOKEN = 5.0  # of the device that stands in for one: 200,000 tokens a second
PERCENTILES = (50, 90, 99, 100)
SLOWEST = 8
DEADLINE_S = 900.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=3)
@click.option("--requests", default=150, show_default=True, type=click.IntRange(min=1))
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--answer-tokens-max", default=256, show_default=True, type=click.IntRange(min=2))
@click.option("--block-tokens", default=128, show_default=True, help="The engine's block size.")
@click.option("--chunk-min", default="64KiB", show_default=True, help="Small chunks are many chunks: more to schedule.")
def main(
    rounds: int,
    output_format: str,
    work: Path,
    requests: int,
    concurrency: int,
    answer_tokens_max: int,
    block_tokens: int,
    chunk_min: str,
) -> None:
    """Microseconds a scheduler step, by percentile and by hook."""
    settings: dict[str, Any] = {
        "rounds": rounds,
        "requests": requests,
        "concurrency": concurrency,
        "answer_tokens_max": answer_tokens_max,
        "block_tokens": block_tokens,
        "chunk_min": chunk_min,
    }

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        progress("making the tiny model")
        base = WorkloadTask(
            model=str(make_tiny_llama(directory / "tiny-llama")),
            kv_transfer_config={},
            requests=requests,
            prefixes=32,
            concurrency=concurrency,
            tokens_min=200,
            tokens_max=4000,
            answer_tokens_max=answer_tokens_max,
            block_tokens=block_tokens,
            kv_blocks=(concurrency + 1) * 4096 // block_tokens,
            seed=0,
            forward_us_per_token=FORWARD_US_PER_TOKEN,
            by_hook=False,
            report_fd=-1,
        )
        figures: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
        for index in range(rounds):
            for form in FORMS if index % 2 == 0 else FORMS[::-1]:
                progress(f"round {index + 1} of {rounds}: {form}")
                done = run_form(
                    form, replace(base, seed=index), directory / f"form-{FORMS.index(form)}-{index}", chunk_min
                )
                figures[form].append(figures_of(done["steps"]))
                add_details(report, form, done)
                p99 = figures[form][-1]["busy steps p99"]
                progress(f"{form}: {len(done['steps'])} steps in {done['seconds']:.1f} s, p99 {p99:.0f} us")
        for form, rows in figures.items():
            if form == PROFILE:
                continue  # timing the hooks slows the steps down
            for name in rows[0]:
                report.add(f"{form}: {name}", "us", [row[name] for row in rows])

    run_bench("scheduler_time", work, output_format, settings, measure)


def run_form(form: str, task: WorkloadTask, directory: Path, chunk_min: str) -> dict[str, Any]:
    """One engine process through the whole workload. Returns what it reported."""
    directory.mkdir()
    pool, log = directory / "pool", directory / "engine.log"
    common: dict[str, Any] = {"chunk_min_bytes": chunk_min, "load_always": True}
    if form == SHARED_CORES:
        task = replace(task, forward_us_per_token=0.0)
    if form == PROFILE:
        task = replace(task, by_hook=True)
    if form == CHURN:
        task = replace(task, answer_tokens_max=CHURN_ANSWER_TOKENS_MAX)
    with nullcontext(("", 0)) if form == EMBEDDED else running_service(directory, pool) as (address, _):
        where = {"service": address} if form != EMBEDDED else {"pool": {"path": str(pool), "size": POOL_SIZE}}
        task = replace(task, kv_transfer_config=connector(**where, **common))
        command = [sys.executable, "-m", "meshfusion.tools.bench.scheduler_engine"]
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with reporting_process(
            command, lambda fd: replace(task, report_fd=fd).to_json(), log, environment=environment
        ) as (_, lines):
            for expected in ("ready", "done"):
                readable, _, _ = select.select([lines], [], [], DEADLINE_S)
                line = lines.readline() if readable else ""
                if not line:
                    raise ServiceError(f"the engine process ended or hangs before {expected}", next_step=f"read {log}")
            event: dict[str, Any] = json.loads(line)
            return event


def figures_of(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds, by name."""
    busy = [step for step in steps if step["scheduled_tokens"]]
    figures: dict[str, float] = {}
    for name, values in (
        ("busy steps", [step["step_ns"] for step in busy]),
        ("all steps", [step["step_ns"] for step in steps]),
    ):
        for percentile in PERCENTILES:
            label = "max" if percentile == 100 else f"p{percentile}"
            figures[f"{name} {label}"] = float(np.percentile(values, percentile)) / 1000
    return figures


def add_details(report: Report, form: str, done: dict[str, Any]) -> None:
    """Totals by hook, the slowest steps, and what the connector counted."""
    steps = done["steps"]
    wall: Counter[str] = Counter()
    cpu: Counter[str] = Counter()
    for step in steps:
        wall.update(step["wall_by_hook_ns"])
        cpu.update(step["cpu_by_hook_ns"])
    report.details.append(
        {
            "form": form,
            "steps": len(steps),
            "busy_steps": sum(1 for step in steps if step["scheduled_tokens"]),
            "over_200_us": sum(1 for step in steps if step["step_ns"] > 200_000),
            **{f"{name}_wall_us": round(ns / 1000) for name, ns in wall.most_common()},
            **{f"{name}_cpu_us": round(ns / 1000) for name, ns in cpu.most_common()},
        }
    )
    for step in sorted(steps, key=lambda step: -int(step["step_ns"]))[:SLOWEST]:
        report.details.append(
            {
                "form": form,
                "slow_step_us": round(step["step_ns"] / 1000),
                "cpu_us": round(step["cpu_ns"] / 1000),
                "tokens": step["scheduled_tokens"],
                **{name: round(ns / 1000) for name, ns in step["wall_by_hook_ns"].items()},
            }
        )
    report.details.append({"form": form, **done["counters"]})
    if not done["counters"].get("loads_started"):
        report.problems.append(f"{form}: nothing was loaded, so loads were not measured")
    if not done["counters"].get("chunks_committed"):
        report.problems.append(f"{form}: nothing was saved, so saves were not measured")


if __name__ == "__main__":
    main()
