"""Ours against vLLM's own OffloadingConnector with its ``fs`` tier: time to first token after an engine restart.

Each round asks five fresh engine processes, all with the same options, prompt and warm-up: one without a connector,
then for each of the two connectors one that fills its cache and one that finds it. The order of the two alternates.

The ``fs`` tier reads through the page cache, which a restart of the engine leaves filled; ours goes around it. With
``--page-cache dropped`` the files are dropped from it before the restart, as when they are more than fits into memory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.bench.engines import ask_once, bench_engine, default_model, embedded, engine_task, prompt_of
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.bench.ttft import problems_of
from meshfusion.tools.engine_process import Answer, wait_for_saves
from meshfusion.tools.quickstart_engine import EngineTask

OURS, THEIRS, NONE = "MeshFusion", "OffloadingConnector+fs", "no connector"
BLOCK_TOKENS = 128  # of the CPU backend
PRIMARY_BYTES = 512 << 20
SAVE_DEADLINE_S = 120.0
FILES_STEADY_S = 2.0


@dataclass(frozen=True, slots=True)
class Peer:
    """``wait_saved(store, prompt_tokens, log)``: until all of the prompt is stored; returns bytes."""

    name: str
    kv_transfer_config: dict[str, Any]
    store: Path
    wait_saved: Callable[[Path, int, Path], int]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=3)
@click.option("--tokens", default=4096, show_default=True, help="Length of the prompt.")
@click.option(
    "--peer-threads", default=16, show_default=True, help="Read and write threads of the fs tier (vLLM's 16)."
)
@click.option(
    "--page-cache",
    type=click.Choice(["kept", "dropped"]),
    default="kept",
    show_default=True,
    help="What becomes of the stored files' page cache before the restart.",
)
@click.option("--model", type=click.Path(path_type=Path), help="Model folder instead of the quickstart's.")
def main(
    rounds: int, output_format: str, work: Path, tokens: int, peer_threads: int, page_cache: str, model: Path | None
) -> None:
    """TTFT after an engine restart, ours over theirs."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        folder = model.absolute() if model else default_model(progress)
        report.settings["model"] = folder.name
        peers = [ours(directory), theirs(directory, peer_threads)]
        cold: dict[str, list[float]] = {NONE: [], OURS: [], THEIRS: []}
        warm: dict[str, list[float]] = {OURS: [], THEIRS: []}
        own: list[float] = []
        token_ids = prompt_of(folder, tokens)
        for index in range(rounds):
            progress(f"round {index + 1} of {rounds}: {NONE}")
            alone = ask_once(engine_task(folder, token_ids, None), directory / "none.log")
            cold[NONE].append(alone.ttft_s)
            for peer in peers if index % 2 == 0 else reversed(peers):
                task = engine_task(folder, token_ids, peer.kv_transfer_config)
                first, second = fill_and_find(report, directory, peer, task, alone, page_cache, progress)
                cold[peer.name].append(first.ttft_s)
                warm[peer.name].append(second.ttft_s)
                if peer.name == OURS:
                    own.append(first.again_ttft_s)
        series = {name: report.add(f"TTFT cold, {name}", "s", samples) for name, samples in cold.items()}
        found = {name: report.add(f"TTFT after a restart, {name}", "s", samples) for name, samples in warm.items()}
        floor = report.add("TTFT, KV in the engine's own cache", "s", own)
        report.compare(found[OURS], found[THEIRS])
        beyond = {
            name: report.add(
                f"TTFT after a restart beyond the own cache's, {name}",
                "s",
                [a - b for a, b in zip(samples, own, strict=True)],
            )
            for name, samples in warm.items()
        }
        report.compare(beyond[OURS], beyond[THEIRS])
        report.compare(floor, found[THEIRS])
        report.compare(found[OURS], series[NONE])
        report.compare(found[THEIRS], series[NONE])
        report.compare(series[OURS], series[NONE])
        report.compare(series[THEIRS], series[NONE])

    settings = {"rounds": rounds, "tokens": tokens, "peer_threads": peer_threads, "page_cache": page_cache}
    run_bench("peer", work, output_format, settings, measure)


def fill_and_find(
    report: Report,
    directory: Path,
    peer: Peer,
    task: EngineTask,
    alone: Answer,
    page_cache: str,
    progress: Progress,
) -> tuple[Answer, Answer]:
    shutil.rmtree(peer.store, ignore_errors=True)
    label = peer.name.partition("+")[0]
    log = directory / f"{label}-cold.log"
    with bench_engine(replace(task, ask_again=True), log) as engine:
        cold = engine.answer()
        asked_s = time.monotonic()
        stored_bytes = peer.wait_saved(peer.store, len(task.token_ids), log)
        save_s = time.monotonic() - asked_s
    progress(f"{peer.name}: cold {cold.ttft_s:.3f} s, {stored_bytes / 1e6:.1f} MB stored")
    if page_cache == "dropped":
        drop_page_cache(peer.store)
    warm = ask_once(task, directory / f"{label}-warm.log")
    progress(f"{peer.name}: after a restart {warm.ttft_s:.3f} s, {warm.cached_tokens} tokens reused")
    report.details.append(
        {
            "connector": peer.name,
            "bytes_stored": stored_bytes,
            "waited_for_save_s": save_s,
            "tokens_reused": warm.cached_tokens,
            "tokens_identical": warm.token_ids == cold.again_token_ids,
            "cold_as_without_connector": cold.token_ids == alone.token_ids,
        }
    )
    report.problems += problems_of(cold, warm, peer.name)
    if warm.cached_tokens < warm.prompt_tokens - 2 * BLOCK_TOKENS:
        report.problems.append(f"{peer.name}: reused only {warm.cached_tokens} of {warm.prompt_tokens} tokens")
    return cold, warm


def ours(directory: Path) -> Peer:
    pool = directory / "pool"
    return Peer(
        OURS, embedded(pool), pool, lambda store, tokens, log: wait_for_saves(store, tokens, log, lambda _: None)
    )


def theirs(directory: Path, threads: int) -> Peer:
    store = directory / "offloading-fs"
    tier = {"type": "fs", "root_dir": str(store), "n_read_threads": threads, "n_write_threads": threads}
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringOffloadingSpec",
            "spec_module_path": "meshfusion.tools.bench.offloading_cpu_spec",
            "cpu_bytes_to_use": PRIMARY_BYTES,
            "secondary_tiers": [tier],
        },
    }
    return Peer(THEIRS, config, store, wait_for_files)


def drop_page_cache(store: Path) -> None:
    """Of all files under ``store``, which nobody maps any more. Unwritten pages cannot be dropped: written first."""
    for path in store.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def wait_for_files(store: Path, prompt_tokens: int, log: Path) -> int:
    """Until there is a finished file for every block of the prompt, and nothing changes any more. Returns bytes."""
    wanted = prompt_tokens // BLOCK_TOKENS
    deadline_s, steady_since_s = time.monotonic() + SAVE_DEADLINE_S, time.monotonic()
    former: dict[Path, int] = {}
    while time.monotonic() < deadline_s:
        files = {path: path.stat().st_size for path in store.rglob("*.bin")} if store.exists() else {}
        if files != former or any(store.rglob("*.tmp*")):
            former, steady_since_s = files, time.monotonic()
        elif len(files) >= wanted and time.monotonic() - steady_since_s >= FILES_STEADY_S:
            if len(set(files.values())) != 1:
                raise ServiceError(f"the files in {store} have different sizes", next_step=f"read {log}")
            return sum(files.values())
        time.sleep(0.05)
    raise ServiceError(
        f"{THEIRS} stored {len(former)} of {wanted} blocks within {SAVE_DEADLINE_S:.0f} s", next_step=f"read {log}"
    )


if __name__ == "__main__":
    main()
