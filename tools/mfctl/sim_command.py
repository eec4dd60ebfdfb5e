"""``mfctl sim``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_bytes, format_option, print_document, print_table

if TYPE_CHECKING:
    from meshfusion.tools.sim.figures import Figures
    from meshfusion.tools.sim.trace import Trace

_POLICIES = ("segments", "blocks", "lru", "frequency-2", "arc", "s3-fifo", "w-tinylfu", "clairvoyant")
_BOUNDED = ("segments", "blocks")  # by --dwpd
_DEFAULT = "segments,blocks,lru,frequency-2,clairvoyant"


def _policies(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    unknown = [name for name in names if name not in _POLICIES]
    if unknown or not names:
        raise click.BadParameter(f"{', '.join(unknown) or 'nothing'} is not of {', '.join(_POLICIES)}.", ctx, param)
    return names


@click.command()
@click.argument(
    "traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path, dir_okay=False)
)  # fmt: skip
@click.option(
    "--size", "sizes", default="1%,5%,20%", show_default=True, metavar="SIZE,...",
    help="Sizes of the pool: shares of the trace's different blocks, or bytes such as 10GiB.",
)  # fmt: skip
@click.option(
    "--policy", "policies", callback=_policies, default=_DEFAULT, show_default=True, metavar="NAME,...",
    help=f"Of {', '.join(_POLICIES)}. The first two are ours; arc, s3-fifo and w-tinylfu need libcachesim.",
)  # fmt: skip
@click.option(
    "--bytes-per-token", default="128KiB", show_default=True, metavar="SIZE", help="KV of one token, all layers."
)
@click.option(
    "--segment-blocks", default=32, show_default=True, type=click.IntRange(2), metavar="N", help="Blocks of a segment."
)
@click.option(
    "--dwpd", type=FiniteRange(0, min_open=True), metavar="N",
    help="Drive writes per day allowed, for segments and blocks: the others know no bound. Default: no bound.",
)  # fmt: skip
@click.option(
    "--session-gap", "session_gap_s", default=10.0, show_default=True, type=FiniteRange(0), metavar="SECONDS",
    help="Coding sessions: each begins so long after the one before.",
)  # fmt: skip
@format_option
def sim(
    traces: tuple[Path, ...], sizes: str, policies: tuple[str, ...], bytes_per_token: str, segment_blocks: int,
    dwpd: float | None, session_gap_s: float, output_format: str,
) -> None:  # fmt: skip
    """Replay request traces against cache policies: hits, bytes written, wear.

    TRACE is of one of two public formats, told by its name: *.jsonl, Mooncake's requests, or *.json, a coding session
    of kv-cache-tester; .gz may follow. Several files are one trace. A line that cannot be read ends the run.
    """
    from meshfusion.jbof.sizes import parse_size_bytes
    from meshfusion.tools.sim.run import SimSettings, run_policy, size_blocks
    from meshfusion.tools.sim.trace import read_traces

    unbounded = [name for name in policies if dwpd is not None and name not in _BOUNDED]
    if len(unbounded) == len(policies):
        raise click.UsageError(
            f"--dwpd bounds {' and '.join(_BOUNDED)} only: add one of them to --policy, or leave it out."
        )
    try:
        settings = SimSettings(parse_size_bytes(bytes_per_token), segment_blocks, dwpd)
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--bytes-per-token") from e
    with replay_progress() as progress:
        reading = progress.add_task("reading", total=len(traces))
        trace = read_traces(traces, session_gap_s, lambda: progress.advance(reading))
        try:
            capacities = [
                size_blocks(size, trace, settings.bytes_per_token * trace.block_tokens) for size in sizes.split(",")
            ]
        except ValueError as e:
            raise click.BadParameter(str(e), param_hint="--size") from e
        runs = [(capacity, policy) for capacity in capacities for policy in policies]
        task = progress.add_task("replaying", total=max(1, len(runs) * trace.accesses))
        found = [
            run_policy(trace, policy, capacity, settings, lambda done: progress.advance(task, done))
            for capacity, policy in runs
        ]
    if output_format != "table":
        runs_told = [_run_object(figures, settings.bound_of(figures.policy)) for figures in found]
        print_document({"trace": _trace_object(trace), "runs": runs_told}, output_format)
        return
    click.echo(
        f"{trace.name}: {len(trace.requests)} requests in {trace.duration_s:.0f} s, {trace.accesses} accesses to "
        f"{trace.unique_blocks} blocks of {trace.block_tokens} tokens"
    )
    click.echo()
    print_table(
        ["SIZE", "POLICY", "HITS", "USABLE", "TOKENS", "WRITES/ACCESS", "WRITTEN", "APP WA", "DWPD"],
        [_row(figures) for figures in found],
    )
    if unbounded:
        click.echo(f"note: --dwpd does not bound {', '.join(unbounded)}, which know no budget of writes", err=True)


def replay_progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


def _row(figures: Figures) -> tuple[object, ...]:
    return (
        figures.capacity_blocks, figures.policy, f"{figures.hit_ratio:.3f}", f"{figures.usable_hit_ratio:.3f}",
        f"{figures.token_hit_ratio:.3f}", f"{figures.writes_per_access:.3f}", format_bytes(figures.bytes_written),
        f"{figures.write_amplification:.2f}", f"{figures.drive_writes_per_day:.1f}",
    )  # fmt: skip


def _trace_object(trace: Trace) -> dict[str, object]:
    return {
        "name": trace.name, "requests": len(trace.requests), "duration_s": trace.duration_s,
        "accesses": trace.accesses, "unique_blocks": trace.unique_blocks, "block_tokens": trace.block_tokens,
    }  # fmt: skip


def _run_object(figures: Figures, bound: float | None) -> dict[str, object]:
    """``bound``: None, its writes were not bounded."""
    return {
        "policy": figures.policy, "capacity_blocks": figures.capacity_blocks, "hits": figures.hits,
        "hit_ratio": figures.hit_ratio, "usable_hit_ratio": figures.usable_hit_ratio,
        "token_hit_ratio": figures.token_hit_ratio, "blocks_written": figures.admitted + figures.rewritten,
        "writes_per_access": figures.writes_per_access, "bytes_written": figures.bytes_written,
        "application_write_amplification": figures.write_amplification,
        "drive_writes_per_day": figures.drive_writes_per_day, "drive_writes_per_day_allowed": bound,
    }  # fmt: skip
