"""Time to first token, cold and warm, each in a fresh engine process over an embedded pool."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from meshfusion.tools.bench.engines import bench_engine, default_model, embedded, engine_task, prompt_of
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.engine_process import Answer, wait_for_saves


@dataclass(slots=True)
class Samples:
    """One prompt length, over the rounds."""

    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    load_gb_per_s: list[float] = field(default_factory=list)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=3)
@click.option("--tokens", default=(1024, 4096, 8064), show_default=True, multiple=True, help="Lengths of the prompt.")
@click.option("--model", type=click.Path(path_type=Path), help="Model folder instead of the quickstart's.")
def main(rounds: int, output_format: str, work: Path, tokens: tuple[int, ...], model: Path | None) -> None:
    """TTFT cold and warm: the pool is made anew for every cold answer."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        folder = model.absolute() if model else default_model(progress)
        report.settings["model"] = folder.name
        samples = {length: Samples() for length in tokens}
        for index in range(rounds):
            for length in tokens:
                progress(f"round {index + 1} of {rounds}, {length} tokens: cold")
                measure_pair(report, directory, folder, length, samples[length], progress)
        for length, found in samples.items():
            cold = report.add(f"TTFT cold, {length} tokens", "s", found.cold_s)
            warm = report.add(f"TTFT warm, {length} tokens", "s", found.warm_s)
            report.add(f"load in the engine, {length} tokens", "GB/s", found.load_gb_per_s)
            report.compare(warm, cold)

    run_bench("ttft", work, output_format, {"rounds": rounds, "tokens": list(tokens)}, measure)


def measure_pair(
    report: Report, directory: Path, model: Path, length: int, samples: Samples, progress: Progress
) -> None:
    pool = directory / "pool"
    shutil.rmtree(pool, ignore_errors=True)
    task = engine_task(model, prompt_of(model, length), embedded(pool))
    log = directory / f"cold-{length}.log"
    with bench_engine(replace(task, ask_again=True), log) as engine:
        cold = engine.answer()
        saved_bytes = wait_for_saves(pool, length, log, lambda text: None)
    progress(f"{length} tokens: cold {cold.ttft_s:.3f} s; warm")
    with bench_engine(task, directory / f"warm-{length}.log") as engine:
        warm = engine.answer()
    progress(f"{length} tokens: warm {warm.ttft_s:.3f} s")
    loaded_bytes, load_s = int(warm.counters.get("loaded_bytes", 0)), warm.counters.get("load_us", 0.0) / 1e6
    samples.cold_s.append(cold.ttft_s)
    samples.warm_s.append(warm.ttft_s)
    samples.load_gb_per_s.append(loaded_bytes / load_s / 1e9 if load_s else 0.0)
    report.details.append(
        {
            "prompt_tokens": warm.prompt_tokens,
            "tokens_reused": warm.cached_tokens,
            "bytes_saved": saved_bytes,
            "bytes_loaded": loaded_bytes,
            "load_s": load_s,
            "tokens_identical": warm.token_ids == cold.again_token_ids,
            "cold_tokens_identical": warm.token_ids == cold.token_ids,
            "start_cold_s": cold.start_s,
            "start_warm_s": warm.start_s,
        }
    )
    report.problems += problems_of(cold, warm, f"{length} tokens")


def problems_of(cold: Answer, warm: Answer, what: str) -> list[str]:
    """Why a pair of answers proves nothing. What is right is what the cold engine answers from its own cache: it, too,
    computes only the end of the prompt, where computing all of it may round the other way at a near tie."""
    problems = []
    if cold.cached_tokens:
        problems.append(f"{what}: the cold engine reused {cold.cached_tokens} tokens")
    if not warm.cached_tokens:
        problems.append(f"{what}: the warm engine reused nothing")
    if cold.again_token_ids != warm.token_ids:
        problems.append(f"{what}: the warm engine answered with other tokens")
    return problems


if __name__ == "__main__":
    main()
