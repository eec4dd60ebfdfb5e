"""For each kind of model: time to first token computed and loaded, the share of loads that is digests, descriptors.

Every round is a whole ``mfctl verify``: one engine computes and saves, a fresh one loads, and all is compared; a
difference makes the numbers void. Times are those of the longest prompt. What digests take is measured beside, over as
many bytes in units of the same sizes, on one thread: loads use several, so the share is of work, not of waiting.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from meshfusion.jbof.digest import load_kernels
from meshfusion.tools.bench.report import Progress, bench_options, run_bench
from meshfusion.tools.bench.report import Report as BenchReport
from meshfusion.tools.mfctl.verify_command import engine_arguments, parse_engine_options
from meshfusion.tools.quickstart_inputs import check_model_dir
from meshfusion.tools.verify.run import Plan, Report, compute, load, report_of

POOL_SIZE = "1GiB"


@dataclass(slots=True)
class Samples:
    """One model, over the rounds."""

    cold_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)
    digest_share: list[float] = field(default_factory=list)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("models", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@bench_options(rounds=3)
@click.option(
    "--engine-option",
    "engine_options",
    metavar="KEY=VALUE",
    multiple=True,
    help="An argument of vllm.LLM, as of mfctl verify.",
)
@click.option(
    "--chunk-min-bytes",
    default=1 << 18,
    show_default=True,
    help="Bytes of a chunk, at least; eight chunks and a token are the longest prompt.",
)
def main(
    models: tuple[Path, ...],
    rounds: int,
    output_format: str,
    work: Path,
    engine_options: tuple[str, ...],
    chunk_min_bytes: int,
) -> None:
    """TTFT computed and loaded, share of digests, and descriptors per chunk, for each model FOLDER."""
    options = parse_engine_options(engine_options)
    settings: dict[str, Any] = {"rounds": rounds, "chunk_min_bytes": chunk_min_bytes, "engine_options": options}

    def measure(report: BenchReport, directory: Path, progress: Progress) -> None:
        for folder in models:
            check_model_dir(folder)  # before the engines of another one take minutes
        samples = {folder: Samples() for folder in models}
        for number in range(rounds):
            for folder in models:
                extra = {
                    "pool": {"path": str(directory / f"{folder.name}-{number}"), "size": POOL_SIZE},
                    "chunk_min_bytes": chunk_min_bytes,
                }
                progress(f"round {number + 1} of {rounds}: {folder.name}")
                arguments = engine_arguments({**options, "model": str(folder.absolute())}, extra)
                found = verified(Plan(arguments, directory, seed=number), progress)
                note(report, folder.name, found, samples[folder])
                shutil.rmtree(directory / f"{folder.name}-{number}")
        for folder, of_model in samples.items():
            cold = report.add(f"TTFT computed, {folder.name}", "s", of_model.cold_s)
            report.compare(report.add(f"TTFT loaded, {folder.name}", "s", of_model.loaded_s), cold)
            report.add(f"digests' share of the load, {folder.name}", "", of_model.digest_share)

    run_bench("kv_kinds", work, output_format, settings, measure)


def verified(plan: Plan, progress: Progress) -> Report:
    computed = compute(plan, progress)
    return report_of(plan, computed, load(plan, computed.prompts, progress))


def note(report: BenchReport, model: str, found: Report, samples: Samples) -> None:
    longest = max(found.prompts, key=lambda prompt: prompt.prompt_tokens)
    counts = found.loader_counts
    load_s = counts.get("load_us", 0) / 1e6
    (kind,) = [name.removeprefix("load_chunks_") for name in counts if name.startswith("load_chunks_")] or [""]
    samples.cold_s.append(longest.cold_ttft_s)
    samples.loaded_s.append(longest.loaded_ttft_s)
    samples.digest_share.append(digest_s(found) / load_s if load_s else 0.0)
    report.problems += [f"{model}: {problem}" for problem in found.problems]
    report.details.append(
        {
            "model": model,
            "groups": ", ".join(f"{group['spec']} ({group['layers']})" for group in found.groups),
            "prompt_tokens": longest.prompt_tokens,
            "loaded_tokens": longest.loaded_tokens,
            "chunk_tokens": found.chunk_tokens,
            "loaded_bytes": counts.get("loaded_bytes", 0),
            "descriptors": counts.get(f"load_descriptors_{kind}", 0),
            "chunks": counts.get(f"load_chunks_{kind}", 0),
        }
    )


def digest_s(found: Report) -> float:
    """Seconds to prove all that the second engine loaded, on one thread, each unit in one run."""
    took_s = 0.0
    for group, result in zip(found.groups, found.group_results, strict=True):
        unit_bytes, unit_count = int(group["block_bytes"]), result.loaded_blocks
        kernels, memory = load_kernels(unit_bytes), np.ones(unit_bytes * max(1, unit_count), dtype=np.uint8)
        run_offsets = np.arange(unit_count, dtype=np.int64).reshape(-1, 1) * unit_bytes
        if unit_count:
            kernels.digest_units(memory, run_offsets, unit_bytes)
            began_s = time.perf_counter()
            kernels.digest_units(memory, run_offsets, unit_bytes)
            took_s += time.perf_counter() - began_s
    return took_s


if __name__ == "__main__":
    main()
