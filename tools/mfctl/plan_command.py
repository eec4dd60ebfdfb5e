"""``mfctl plan``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from meshfusion.tools.mfctl.exit_codes import EXIT_FAILURE
from meshfusion.tools.mfctl.output import format_option
from meshfusion.tools.mfctl.plan_options import given_options, model_options
from meshfusion.tools.mfctl.sim_command import replay_progress
from meshfusion.tools.plan.given import BY_NAME

if TYPE_CHECKING:
    from meshfusion.host.kv.chunk_form import ChunkForm
    from meshfusion.tools.model_kv import ModelKv
    from meshfusion.tools.plan.replay import Replay

_OF_THE_TRACE: Final = ("prompt_tokens", "written_share", "rewrite_share", "working_set_hours")
_USUAL_BLOCK_TOKENS: Final = 16


@click.command()
@click.argument("model", required=False, metavar="MODEL", type=click.Path(path_type=Path))
@model_options
@click.option(
    "--trace", "traces", multiple=True, metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
    help="A request trace, as `mfctl sim` reads it, instead of assumptions; may be given several times. With --drives "
    "and --drive-size: its hits on them. With --hit-ratio: the size of the pool for them.",
)  # fmt: skip
@given_options
@click.option("--explain", is_flag=True, help="Show the formula of each figure, and where it comes from.")
@format_option
def plan(
    model: Path | None, kv_bytes_per_token: int | None, replicated: bool, block_size: int | None, rank_count: int,
    dtype: str, kv_cache_dtype: str, max_model_len: int | None, chunk_min_bytes: int, traces: tuple[Path, ...],
    explain: bool, output_format: str, **given: Any,
) -> None:  # fmt: skip
    """Size a pool: room, bandwidth, endurance and memory for a model and a workload.

    MODEL is a folder with a config.json; the engine's own code tells the KV of it, without weights, in up to a minute.
    Where there is no engine, --kv-bytes-per-token does without. Whatever is not given and has no default is not
    computed, and what it would take is said. Nothing is measured here: what comes out is as right as what is given. The
    formulas: docs/sizing.md.

    Exits 1 when something is not enough (in JSON, is_enough is false then), or the model is not served.
    """
    from meshfusion.tools.mfctl.plan_output import Shown, print_plan
    from meshfusion.tools.plan.plan import make_plan

    if (model is None) == (kv_bytes_per_token is None):
        raise click.UsageError("Name either the folder of a MODEL or --kv-bytes-per-token.")
    if replicated and kv_bytes_per_token is None:
        raise click.UsageError("--replicated is for --kv-bytes-per-token: of a MODEL the engine says so.")
    if traces:
        _check_trace_usage(given)
    described = None
    if model is not None:
        described, form = _form_of(model, rank_count, chunk_min_bytes, block_size, dtype, kv_cache_dtype, max_model_len)
    else:
        assert kv_bytes_per_token is not None
        form = _form_of_bytes(kv_bytes_per_token, block_size, rank_count, replicated, chunk_min_bytes)
    replay = _replay(form, traces, given) if traces else None
    found = make_plan(form, given if replay is None else {**given, **replay.given()})
    print_plan(Shown(found, described, block_size, form, replay, tuple(map(str, traces))), explain, output_format)
    if not found.is_enough:
        sys.exit(EXIT_FAILURE)


def _check_trace_usage(given: dict[str, Any]) -> None:
    both = [BY_NAME[name].option for name in _OF_THE_TRACE if given[name] is not None]
    if both:
        raise click.UsageError(f"--trace tells what {', '.join(both)} would: leave that out, or the trace.")
    if given["hit_ratio"] is None and (given["drives"] is None or given["drive_bytes"] is None):
        raise click.UsageError("--trace needs a pool, --drives and --drive-size, or the --hit-ratio that is wanted.")


def _form_of(
    model: Path, rank_count: int, chunk_min_bytes: int, block_size: int | None, dtype: str, kv_cache_dtype: str,
    max_model_len: int | None,
) -> tuple[ModelKv, ChunkForm]:  # fmt: skip
    from meshfusion.tools.model_kv import EngineSettings, describe_model
    from meshfusion.tools.plan.model_form import form_of_model

    click.echo("building the model's skeleton with the engine's own code, up to a minute ...", err=True)
    settings = EngineSettings(rank_count, block_size, dtype, kv_cache_dtype, max_model_len)
    described = describe_model(model, settings)
    return described, form_of_model(described, rank_count=rank_count, chunk_min_bytes=chunk_min_bytes)


def _form_of_bytes(
    kv_bytes_per_token: int, block_size: int | None, rank_count: int, replicated: bool, chunk_min_bytes: int
) -> ChunkForm:
    from meshfusion.tools.plan.model_form import form_of_bytes

    return form_of_bytes(
        kv_bytes_per_token,
        block_tokens=block_size or _USUAL_BLOCK_TOKENS,
        rank_count=rank_count,
        is_replicated=replicated,
        chunk_min_bytes=chunk_min_bytes,
    )


def _replay(form: ChunkForm, traces: tuple[Path, ...], given: dict[str, Any]) -> Replay:
    from meshfusion.tools.plan.plan import make_plan
    from meshfusion.tools.plan.replay import Streams, check_trace, replay_at, replay_for
    from meshfusion.tools.sim.trace import SESSION_GAP_S, read_traces

    before = make_plan(form, {**given, "hit_ratio": None}).values
    with replay_progress() as progress:
        reading = progress.add_task("reading", total=len(traces))
        trace = read_traces(traces, SESSION_GAP_S, lambda: progress.advance(reading))
        check_trace(trace)
        streams = Streams(trace, given["requests_per_s"], before["medium_bytes_per_token"])
        task = progress.add_task("replaying", total=None)

        def advance(done: int) -> None:
            progress.advance(task, done)

        if given["hit_ratio"] is not None:
            return replay_for(streams, given["hit_ratio"], advance)
        return replay_at(streams, before["usable_bytes"], advance)
