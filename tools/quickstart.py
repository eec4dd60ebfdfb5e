"""The main job, seen from outside: a document is answered by one engine process, then by a fresh one from the pool.

Run it with ``tools/quickstart``. The pool is made anew each time, so the first answer is cold.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshfusion.jbof.errors import MediaError, MeshFusionError, PoolBusyError, ServiceError
from meshfusion.tools.engine_process import engine_process, wait_for_saves
from meshfusion.tools.mfctl.exit_codes import EXIT_INTERRUPTED
from meshfusion.tools.mfctl.output import report_error, report_object, wanted_format
from meshfusion.tools.quickstart_engine import EngineTask
from meshfusion.tools.quickstart_inputs import (
    ANSWER_TOKENS,
    CONTEXT_MIN,
    check_context,
    check_model_dir,
    check_pool_size,
    read_document,
    read_prompt,
)

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "tools" / "data" / "pride-and-prejudice.txt"
CACHE = ROOT / ".cache"

__all__ = ["DOCUMENT", "Outcome", "cli", "main", "read_prompt", "run"]


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


_EPILOG = f"""A first run takes about 5 to 10 minutes: it installs what is needed and makes the model folder. Later ones
take about a minute.

A prompt of whole blocks gets one token more (--context 4096 may report 4097), so that the answer can be compared with
the one from the engine's own prefix cache, which never covers a whole prompt. --context is at least {CONTEXT_MIN}.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.option("--model", type=click.Path(path_type=Path), help="Model folder to use instead of SmolLM2-135M-Instruct.")
@click.option("--context", default=4096, show_default=True, metavar="N", help="Tokens of the document to ask about.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT, help="Text file instead of the novel.")
@click.option("--pool-size", default="4GiB", show_default=True, help="Size bound of the pool's file.")
@click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(model: Path | None, context: int, document: Path, pool_size: str, output_format: str) -> None:
    """Answer a document with one vLLM process, then with a fresh one that reuses its KV from a MeshFusion pool."""
    outcome = run(model, context, document, pool_size, Console(stderr=True))
    if output_format == "json":
        click.echo(json.dumps(asdict(outcome)))
    else:
        Console().print(_table(outcome))
        click.echo(f"The pool is kept until the next run. To look at it: {_look_at(Path(outcome.pool))}")
    _check_outcome(outcome)


def cli(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Errors go to standard error, as JSON if that was asked for."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    output_format = wanted_format(given)
    try:
        main.main(given, prog_name="tools/quickstart", standalone_mode=False)
    except MeshFusionError as error:
        return report_error(error, output_format)
    except click.ClickException as error:
        if output_format != "table":
            report_object(
                type(error).__name__,
                error.format_message(),
                "see tools/quickstart --help",
                error.exit_code,
                output_format,
            )
        else:
            error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise  # not about a file: a defect, wants its traceback
        told = MediaError(f"{error.filename}: {error.strerror}", next_step="check the path, permissions and space")
        return report_error(told, output_format)
    return 0


def run(model: Path | None, context: int, document: Path, pool_size: str, console: Console) -> Outcome:
    """Both phases. Raises MeshFusionError with a way out; what can be known at once is checked at once."""
    check_context(context)
    read_document(document)
    check_pool_size(pool_size)
    if model is not None:
        check_model_dir(model)
    with _only_one(CACHE / "quickstart.lock"):
        return _run_phases(model, context, document, pool_size, console)


def _run_phases(model: Path | None, context: int, document: Path, pool_size: str, console: Console) -> Outcome:
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


def _check_outcome(outcome: Outcome) -> None:
    """Raises ServiceError when the pool was of no use, or of worse than none."""
    log = CACHE / "quickstart" / "warm.log"
    if not outcome.tokens_identical:
        raise ServiceError(
            "the warm engine answered with other tokens than the first one does from its own prefix cache",
            next_step=f"do not use this pool with this model; keep {log} and report it",
        )
    if outcome.tokens_reused == 0 or outcome.bytes_loaded == 0:
        raise ServiceError("nothing was reused from the pool", next_step=f"read {log}")


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Raises PoolBusyError while another quickstart runs here: each begins by removing the last one's pool."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PoolBusyError(
                f"another tools/quickstart is running in {ROOT}", next_step="wait until it has ended, then try again"
            ) from error
        yield


def _task(model: Path, token_ids: tuple[int, ...], pool: Path, pool_size: str) -> EngineTask:
    return EngineTask(
        model=str(model),
        token_ids=token_ids,
        answer_tokens=ANSWER_TOKENS,
        ask_again=True,
        max_model_len=len(token_ids) + ANSWER_TOKENS,  # what read_prompt has held against the model's limit
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
    """A spinner on a terminal; elsewhere one line when it starts and one when it has ended."""
    started_s = time.monotonic()
    name = escape(name)
    if not console.is_terminal:
        console.print(f"… {name}", highlight=False, soft_wrap=True)
    with console.status(name) as status:

        def note(text: str) -> None:
            status.update(f"{name}: {escape(text)}")

        yield note
    took_s = time.monotonic() - started_s
    console.print(f"[green]✓[/] {name} [dim]({took_s:.1f} s)[/]", highlight=False, soft_wrap=True)


def _look_at(pool: Path) -> str:
    """A command line for the folder the reader is in, short where it can be."""
    here = Path.cwd()
    mfctl = Path(sys.executable).parent / "mfctl"
    shown = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in (mfctl, pool)]
    return f"{shown[0]} chunk list {shown[1]}"


def _table(outcome: Outcome) -> Table:
    table = Table(title=f"{escape(outcome.model)}, {outcome.prompt_tokens} tokens of prompt", show_header=False)
    table.add_row("time to first token, cold", f"{outcome.ttft_cold_s:.3f} s")
    table.add_row("time to first token, warm", f"{outcome.ttft_warm_s:.3f} s  ({outcome.speedup:.0f} times as fast)")
    table.add_row("tokens reused", f"{outcome.tokens_reused} of {outcome.prompt_tokens}")
    table.add_row(
        "bytes moved", f"{outcome.bytes_saved / 1e6:.1f} MB saved, {outcome.bytes_loaded / 1e6:.1f} MB loaded"
    )
    table.add_row("load rate", f"{outcome.load_gb_per_s:.2f} GB/s, every block proven by its digest")
    identical = "yes" if outcome.tokens_identical else "NO"
    table.add_row("tokens identical", f"{identical}, as from the first engine's own prefix cache")
    if not outcome.cold_tokens_identical:
        table.add_row("", "[dim]the cold answer differs at a near tie, as it does from that cache[/]")
    return table


if __name__ == "__main__":
    sys.exit(cli())
