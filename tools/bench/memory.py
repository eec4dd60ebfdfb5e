"""The connector's extra resident memory in an engine process, embedded and with a service.

Every engine answers the same prompt in a fresh process. Where there is a connector, its pool holds the first half of
the prompt, so that the one request both loads and saves. Memory is read when the saves have ended.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.bench.engines import (
    bench_engine,
    connector,
    default_model,
    embedded,
    engine_task,
    prompt_of,
    running_service,
)
from meshfusion.tools.bench.processes import Memory, memory_of, session_processes
from meshfusion.tools.bench.report import Progress, Report, Series, bench_options, run_bench
from meshfusion.tools.engine_process import wait_for_saves

NONE, EMBEDDED, SERVICE = "no connector", "embedded", "service"
FORMS = (NONE, EMBEDDED, SERVICE)
ROLES = {"scheduler process": "VLLM::EngineCore", "worker process": "VLLM::Worker"}
SETTLE_S = 2.0
LOOKUP_DEADLINE_MS = 2000  # on a busy machine, too, a load is to be seen
QUICKSTART_UNIT_BYTES = 30 * 98_304
PARTS_DEADLINE_S = 300
MB = 1e6


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=3)
@click.option("--tokens", default=4096, show_default=True, help="Length of the prompt.")
@click.option("--model", type=click.Path(path_type=Path), help="Model folder instead of the quickstart's.")
def main(rounds: int, output_format: str, work: Path, tokens: int, model: Path | None) -> None:
    """Extra resident memory of an engine with the connector."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        folder = model.absolute() if model else default_model(progress)
        report.settings["model"] = folder.name
        progress("filling a pool with the first half of the prompt")
        half = prompt_of(folder, tokens // 2)
        log = directory / "fill.log"
        filled = directory / "filled-pool"
        with bench_engine(engine_task(folder, half, embedded(filled)), log) as engine:
            engine.answer()
            wait_for_saves(filled, len(half), log, lambda text: None)
        found: dict[str, list[dict[str, Memory]]] = {form: [] for form in FORMS}
        service: list[Memory] = []
        for index in range(rounds):
            shift = index % len(FORMS)
            for form in FORMS[shift:] + FORMS[:shift]:
                progress(f"round {index + 1} of {rounds}: {form}")
                memories = measure_form(form, folder, tokens, directory, filled, report, service)
                found[form].append(memories)
                progress(f"{form}: " + ", ".join(f"{who} {m.rss_bytes / MB:.0f} MB" for who, m in memories.items()))
        add_figures(report, found)
        report.add("service process: rss", "MB", [memory.rss_bytes / MB for memory in service])
        progress("taking the parts up one by one")
        add_parts(report, directory)

    run_bench("memory", work, output_format, {"rounds": rounds, "tokens": tokens}, measure)


def measure_form(
    form: str, model: Path, tokens: int, directory: Path, filled: Path, report: Report, service: list[Memory]
) -> dict[str, Memory]:
    """The memory of the engine's processes, by role, after one request."""
    pool = directory / "pool"
    shutil.rmtree(pool, ignore_errors=True)
    shutil.copytree(filled, pool)
    log = directory / f"{form.replace(' ', '-')}.log"
    with _surroundings(form, directory, pool) as (kv_transfer_config, service_pid):
        task = engine_task(model, prompt_of(model, tokens), kv_transfer_config)
        with bench_engine(task, log) as engine:
            answer = engine.answer()
            if form != NONE:
                wait_for_saves(pool, tokens, log, lambda text: None)
                report.details.append({"form": form, "tokens_reused": answer.cached_tokens, **answer.counters})
                if not answer.cached_tokens:
                    report.problems.append(f"{form}: nothing was loaded, so staging for loads was never touched")
            time.sleep(SETTLE_S)
            if service_pid:
                service.append(memory_of(service_pid))
            return _engine_memory(engine.pid, log)


@contextmanager
def _surroundings(form: str, directory: Path, pool: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """The configuration of the engine, and the process id of the service where there is one, else 0."""
    if form == SERVICE:
        with running_service(directory / "service", pool) as (address, pid):
            yield connector(service=address, lookup_deadline_ms=LOOKUP_DEADLINE_MS), pid
    elif form == EMBEDDED:
        yield embedded(pool, lookup_deadline_ms=LOOKUP_DEADLINE_MS), 0
    else:
        yield None, 0


def _engine_memory(session_id: int, log: Path) -> dict[str, Memory]:
    """By role, and of the whole session. On CPU, vLLM gives the worker a process of its own."""
    processes = session_processes(session_id)
    memories = {pid: memory_of(pid) for pid in processes}
    by_role: dict[str, Memory] = {}
    for role, title in ROLES.items():
        pids = [pid for pid, command in processes.items() if title in command]
        if len(pids) != 1:
            raise ServiceError(f"{len(pids)} processes named {title} among {processes}", next_step=f"read {log}")
        by_role[role] = memories[pids[0]]
    return {**by_role, "all engine processes": sum(memories.values(), Memory(0, 0, 0, 0))}


def add_figures(report: Report, found: dict[str, list[dict[str, Memory]]]) -> None:
    for who in found[NONE][0]:
        for kind in ("rss", "pss", "uss", "anonymous"):
            series: dict[str, Series] = {}
            for form in FORMS:
                samples = [getattr(memories[who], f"{kind}_bytes") / MB for memories in found[form]]
                series[form] = report.add(f"{who}, {form}: {kind}", "MB", samples)
            for form in (EMBEDDED, SERVICE):
                pairs = zip(series[form].samples, series[NONE].samples, strict=True)
                report.add(f"{who}, extra of {form}: {kind}", "MB", [a - b for a, b in pairs])


def add_parts(report: Report, directory: Path) -> None:
    command = [sys.executable, "-m", "meshfusion.tools.bench.memory_parts", str(directory), str(QUICKSTART_UNIT_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PARTS_DEADLINE_S, check=False)
    if done.returncode:
        report.problems.append(f"the parts could not be measured: {done.stderr[-500:]}")
        return
    parts = json.loads(done.stdout.splitlines()[-1])
    for part, added in parts["added"].items():
        row = {"part": part, "rss_mb": added["rss_bytes"] / MB, "anonymous_mb": added["anonymous_bytes"] / MB}
        report.details.append(row)
    report.details.append({"loaded_by_vllm_already": parts["loaded_by_vllm_already"]})


if __name__ == "__main__":
    main()
