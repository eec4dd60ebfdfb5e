"""The table of docs/medium-policies.md: policies on the public traces, as Markdown.

FOLDER holds ``mooncake_conversation_trace.jsonl.gz``, ``mooncake_synthetic_trace.jsonl.gz`` and
``claude-code/trace_*.json.gz``. Of the sessions the even and the odd ones (in the order of their names) are run apart
too: no setting was chosen by the odd ones alone, nor by the synthetic trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from meshfusion.tools.sim.figures import Figures
from meshfusion.tools.sim.restart import Restart, second_half
from meshfusion.tools.sim.run import POLICIES, SimSettings, run_policy, size_blocks
from meshfusion.tools.sim.trace import SESSION_GAP_S, Trace, read_traces

SIZES = ("1%", "5%", "20%")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), default=POLICIES)
@click.option("--set", "chosen", multiple=True, help="Only these sets, by name.")
@click.option("--size", "sizes", multiple=True, default=SIZES, help="Only these sizes.")
@click.option("--restart", is_flag=True, help="Instead: the second half of each trace, with and without a restart.")
def main(
    folder: Path, policies: tuple[str, ...], chosen: tuple[str, ...], sizes: tuple[str, ...], restart: bool
) -> None:
    """Print a Markdown table, a row as soon as it is known."""
    columns = "| trace | size | policy | hits | usable hits | tokens | writes per access | app WA |"
    click.echo(f"{columns}\n|{'---|' * 8}")
    for name, paths in trace_sets(folder):
        if chosen and name not in chosen:
            continue
        trace = read_traces(paths, SESSION_GAP_S)
        for size in sizes:
            for figures in run_restarts(trace, size) if restart else run_size(trace, size, policies):
                click.echo(f"| {name} | {size} | {row(figures)} |")
                sys.stdout.flush()


def trace_sets(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    sessions = sorted((folder / "claude-code").glob("trace_*.json.gz"))
    yield "conversation", [folder / "mooncake_conversation_trace.jsonl.gz"]
    yield "60 sessions", sessions
    yield "synthetic", [folder / "mooncake_synthetic_trace.jsonl.gz"]
    yield "even sessions", sessions[::2]
    yield "odd sessions", sessions[1::2]


def run_size(trace: Trace, size: str, policies: tuple[str, ...]) -> Iterator[Figures]:
    settings = SimSettings()
    capacity_blocks = size_blocks(size, trace, settings.bytes_per_token * trace.block_tokens)
    for policy in policies:
        yield run_policy(trace, policy, capacity_blocks, settings)


def run_restarts(trace: Trace, size: str) -> Iterator[Figures]:
    settings = SimSettings()
    capacity_blocks = size_blocks(size, trace, settings.bytes_per_token * trace.block_tokens)
    for restart in Restart:
        yield second_half(trace, capacity_blocks, settings, restart)


def row(figures: Figures) -> str:
    return (
        f"{figures.policy} | {figures.hit_ratio:.3f} | {figures.usable_hit_ratio:.3f} | {figures.token_hit_ratio:.3f} "
        f"| {figures.writes_per_access:.3f} | {figures.write_amplification:.2f}"
    )


if __name__ == "__main__":
    main()
