"""The main job, seen from outside: a document is answered by one engine process, then by a fresh one from the pool.

Run it with ``tools/quickstart``. The pool is made anew each time, so the first answer is cold.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from meshfusion.jbof.errors import ConfigError, MeshFusionError
from meshfusion.tools.engine_process import engine_process, wait_for_saves
from meshfusion.tools.quickstart_engine import EngineTask

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "tools" / "data" / "pride-and-prejudice.txt"
CACHE = ROOT / ".cache"
ANSWER_TOKENS = 16
CONTEXT_MIN = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """The object ``--format json`` prints. Seconds, tokens, bytes.

    ``tokens_identical``: the warm process answers as the first process does from its own prefix cache.
    ``cold_tokens_identical``: as it did when it computed everything; a near tie may fall the other way there.
    """

    model: str
    prompt_tokens: int
    ttft_cold_s: float
    ttft_warm_s: float
    speedup: float
    tokens_reused: int
    bytes_saved: int
    bytes_loaded: int
    load_s: float
    load_gb_per_s: float
    tokens_identical: bool
    logprob_difference_max: float
    cold_tokens_identical: bool
    pool: str


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Path(path_type=Path), help="Model folder to use instead of SmolLM2-135M-Instruct.")
@click.option("--context", default=4096, show_default=True, metavar="N", help="Tokens of the document to ask about.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Text file instead of the novel.")
@click.option("--pool-size", default="4GiB", show_default=True, help="Size bound of the pool's file.")
@click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(model: Path | None, context: int, document: Path, pool_size: str, output_format: str) -> None:
    """Answer a document with one vLLM process, then with a fresh one that reuses its KV from a MeshFusion pool."""
    console = Console(stderr=True)
    try:
        outcome = run(model, context, document, pool_size, console)
    except MeshFusionError as error:
        console.print(f"[bold red]error:[/] {error}", markup=True, highlight=False)
        sys.exit(1)
    if output_format == "json":
        click.echo(json.dumps(asdict(outcome)))
    else:
        Console().print(_table(outcome))
    problem = _problem_of(outcome)
    if problem:
        console.print(f"[bold red]FAILED:[/] {problem}", highlight=False)
        sys.exit(1)


def run(model: Path | None, context: int, document: Path, pool_size: str, console: Console) -> Outcome:
    """Both phases. Raises MeshFusionError with a way out."""
    if context < CONTEXT_MIN:
        raise ConfigError(
            f"--context {context} is too short to reuse anything", next_step=f"use at least {CONTEXT_MIN}"
        )
    if model is None:
        from meshfusion.tools.quickstart_model import DEFAULT_MODEL_DIR, prepare_model

        with _step(console, "preparing the model") as note:
            model = prepare_model(ROOT / DEFAULT_MODEL_DIR, note)
    model = model.absolute()
    with _step(console, f"reading {document.name}"):
        token_ids = read_prompt(model, document, context)
    work = CACHE / "quickstart"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    pool = work / "pool"
    task = _task(model, token_ids, pool, pool_size)
    cold_log = work / "cold.log"
    with _step(console, "first engine process: cold") as note, engine_process(task, cold_log, note) as cold_engine:
        cold = cold_engine.answer()
        note(f"answered in {cold.ttft_s:.2f} s; waiting for the pool to have it all")
        bytes_saved = wait_for_saves(pool, len(token_ids), cold_log, note)
    warm_log = work / "warm.log"
    task = replace(task, ask_again=False)
    with _step(console, "second engine process: warm") as note, engine_process(task, warm_log, note) as warm_engine:
        warm = warm_engine.answer()
    load_s = warm.counters.get("load_us", 0.0) / 1e6
    bytes_loaded = int(warm.counters.get("loaded_bytes", 0))
    return Outcome(
        model=model.name,
        prompt_tokens=warm.prompt_tokens,
        ttft_cold_s=cold.ttft_s,
        ttft_warm_s=warm.ttft_s,
        speedup=cold.ttft_s / warm.ttft_s,
        tokens_reused=warm.cached_tokens,
        bytes_saved=bytes_saved,
        bytes_loaded=bytes_loaded,
        load_s=load_s,
        load_gb_per_s=bytes_loaded / load_s / 1e9 if load_s else 0.0,
        tokens_identical=warm.token_ids == cold.again_token_ids,
        logprob_difference_max=max(
            abs(ours - theirs) for ours, theirs in zip(warm.again_logprobs, cold.again_logprobs, strict=True)
        ),
        cold_tokens_identical=cold.token_ids == warm.token_ids,
        pool=str(pool),
    )


def _problem_of(outcome: Outcome) -> str:
    if not outcome.tokens_identical:
        return "the warm engine answered with other tokens than the first one does from its own prefix cache"
    if outcome.tokens_reused == 0 or outcome.bytes_loaded == 0:
        return f"nothing was reused from the pool; see {CACHE / 'quickstart' / 'warm.log'}"
    return ""


def read_prompt(model: Path, document: Path, context: int) -> tuple[int, ...]:
    """The first ``context`` tokens of the document. Raises ConfigError when model, document or length do not fit."""
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model} is not a model folder: it has no config.json",
            next_step="give the path of a folder in Hugging Face format, or leave --model out",
        )
    if not document.is_file():
        raise ConfigError(f"--document {document} does not exist", next_step="give the path of a text file")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and context + 1 + ANSWER_TOKENS > limit:
        raise ConfigError(
            f"--context {context} does not fit the model's {limit} positions",
            next_step=f"use at most {limit - ANSWER_TOKENS - 1}",
        )
    token_ids = AutoTokenizer.from_pretrained(model)(document.read_text()).input_ids
    if len(token_ids) <= context:
        raise ConfigError(
            f"{document.name} has {len(token_ids)} tokens, --context asks for {context}",
            next_step=f"use --context {len(token_ids) - 1} or a longer --document",
        )
    return tuple(token_ids[: context + 1])


def _task(model: Path, token_ids: tuple[int, ...], pool: Path, pool_size: str) -> EngineTask:
    return EngineTask(
        model=str(model),
        token_ids=token_ids,
        answer_tokens=ANSWER_TOKENS,
        ask_again=True,
        max_model_len=len(token_ids) + 128,
        kv_cache_gib=2,
        kv_transfer_config={
            "kv_connector": "MeshFusionConnector",
            "kv_connector_module_path": "meshfusion.host.connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"pool": {"path": str(pool), "size": pool_size}},
        },
        report_fd=-1,
    )


# ---- what people see ---------------------------------------------------------------------------------------------


@contextmanager
def _step(console: Console, name: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, one line a step elsewhere."""
    started_s = time.monotonic()
    with console.status(name) as status:

        def note(text: str) -> None:
            status.update(f"{name}: {text}")

        yield note
    console.print(f"[green]✓[/] {name} [dim]({time.monotonic() - started_s:.1f} s)[/]", highlight=False)


def _table(outcome: Outcome) -> Table:
    table = Table(title=f"{outcome.model}, {outcome.prompt_tokens} tokens of prompt", show_header=False)
    table.add_row("time to first token, cold", f"{outcome.ttft_cold_s:.3f} s")
    table.add_row("time to first token, warm", f"{outcome.ttft_warm_s:.3f} s  ({outcome.speedup:.0f} times as fast)")
    table.add_row("tokens reused", f"{outcome.tokens_reused} of {outcome.prompt_tokens}")
    table.add_row(
        "bytes moved", f"{outcome.bytes_saved / 1e6:.1f} MB saved, {outcome.bytes_loaded / 1e6:.1f} MB loaded"
    )
    table.add_row("load rate", f"{outcome.load_gb_per_s:.2f} GB/s, every block proven by its digest")
    table.add_row("tokens identical", "yes" if outcome.tokens_identical else "NO")
    if not outcome.cold_tokens_identical:
        table.add_row("", "[dim]the cold answer differs at a near tie, as with vLLM's own prefix cache[/]")
    return table


if __name__ == "__main__":
    main()
