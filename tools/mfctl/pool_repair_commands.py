"""``mfctl pool rebuild-index`` and ``mfctl pool repair``."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.tools.mfctl.encrypted_pools import drives_open
from meshfusion.tools.mfctl.exported_pool import exported_pool, target_of
from meshfusion.tools.mfctl.output import format_bytes, format_option, format_seconds, print_document
from meshfusion.tools.mfctl.progress import Progress

if TYPE_CHECKING:
    from meshfusion.dpu.budgets import SpentBudgets
    from meshfusion.dpu.config import MediumConfig

_OLD_INDEX = "the index, or its absence, is as it was"
_REPAIRED = "what was repaired until then stays so"
PATH = click.Path(path_type=Path, readable=False)


@click.command("rebuild-index")
@click.argument("path", type=PATH)
@click.option(
    "--config", "config_path", type=PATH, metavar="FILE",
    help="The service's configuration: for a pool that was exported, so that its target can be asked for hosts.",
)  # fmt: skip
@format_option
def rebuild_index(path: Path, config_path: Path | None, output_format: str) -> None:
    """Make the index of the pool in PATH anew from what is on its drives, when it is lost or damaged.

    Nobody may use the pool meanwhile, and no engine that used it may live. Chunks of segments that were being written
    are compared with their digests. What was dropped as damaged may be found again; a load finds that again, too. A
    drive that is away is left out, and is not used before this is done again with it. Where writes are bounded
    (medium.drive_writes_per_day), the bound counts as spent: for how long the service then saves less is said.
    """
    from meshfusion.dpu.pool_rebuild import rebuild_index as rebuild

    served = None if config_path is None else exported_pool(path, config_path)
    has_hosts = None if served is None else target_of(path, served)
    began_s = time.monotonic()
    with drives_open(path), Progress("reading segments", left=_OLD_INDEX) as progress:
        rebuilt = rebuild(path, progress.update, has_hosts=has_hosts)
    report, seconds = rebuilt.report, time.monotonic() - began_s
    if output_format != "table":
        print_document({"rebuilt": rebuilt, "seconds": seconds}, output_format)
        return
    click.echo(
        f"found {report.chunks_found} chunks in {report.segments_with_summary + report.segments_scanned} segments, "
        f"{report.segments_scanned} of them scanned; {report.segments_free} segments are free"
    )
    if report.chunks_refused:
        click.echo(
            f"left out {report.chunks_refused} extents that are not what they say, or were not written to the end"
        )
    if report.shards_left_out:
        click.echo(f"left out {report.shards_left_out} shards of chunks of which not all shards were found")
    for number, problem in rebuilt.drives_left_out:
        click.echo(f"left out drive {number} and every chunk with a shard on it: {problem}")
    if rebuilt.drives_left_out:
        click.echo(f"to use it again: mfctl pool rebuild-index {shlex.quote(str(path))} when it is there")
    if rebuilt.reads_failed:
        click.echo(f"left out what {rebuilt.reads_failed} failed reads would have shown: look at the drive's health")
    click.echo(f"read {format_bytes(rebuilt.blocks_read * 4096)} in {rebuilt.reads} reads and {seconds:.1f} s")
    _tell_budgets(rebuilt.budgets, None if served is None else served.medium)


def _tell_budgets(budgets: SpentBudgets, medium: MediumConfig | None) -> None:
    """Where the service's configuration is not known, it may have a bound."""
    first_s, bound, divisor = budgets.first_segment_s_at_1_dwpd, "N", " / N"
    if medium is not None:
        if medium.drive_writes_per_day is None:
            return
        first_s /= medium.drive_writes_per_day
        bound, divisor = f"{medium.drive_writes_per_day:g}", ""
    click.echo(
        f"with medium.drive_writes_per_day: {bound}, the budget of writes counts as spent, since the drives do not "
        f"tell what was written lately: the service saves nothing for its first {format_seconds(first_s)}{divisor}, "
        f"and less than usual for up to {format_seconds(budgets.whole_s)}"
    )


@click.command()
@click.argument("path", type=PATH)
@format_option
def repair(path: Path, output_format: str) -> None:
    """Check the pool in PATH and drop what is damaged; copies that are known to be right are written anew.

    Nobody may use the pool meanwhile. What is dropped, engines recompute.
    """
    from meshfusion.dpu.pool_repair import repair_pool

    with drives_open(path), Progress("checking chunks", left=_REPAIRED) as progress:
        report = repair_pool(path, progress.update)
    if output_format != "table":
        print_document(report, output_format)
        return
    click.echo(f"checked {report.chunks_checked} chunks")
    if report.chunks_away:
        click.echo(f"left out {report.chunks_away} chunks with a shard on a drive that is away")
    for line in report.chunks_dropped:
        click.echo(f"dropped: {line}")
    if report.index_entries_dropped:
        click.echo(f"dropped: {report.index_entries_dropped} entries of the index")
    for line in (*report.segments_repaired, *report.labels_repaired):
        click.echo(f"written anew: {line}")
