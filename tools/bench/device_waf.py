"""Device write amplification, modelled: our segments against one file for each block on a file system.

Nothing is measured on a drive: ``tools/ftl`` models one (docs/device-waf.md tells what it leaves out). A round is one
seed. Sizes are relative to the drive's superblock, 16 MiB here in a drive of 8 GiB: what counts are the ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.ftl.device import FlashDrive
from meshfusion.tools.ftl.file_pattern import FilePattern, FileWriter
from meshfusion.tools.ftl.geometry import drive_of
from meshfusion.tools.ftl.measure import Amplification, measure
from meshfusion.tools.ftl.segment_pattern import (
    FOUR_CLASSES,
    ONE_CLASS,
    LifetimeClass,
    ReclaimOrder,
    SegmentPattern,
    SegmentWriter,
)

SUPERBLOCK_PAGES: Final = 4096
LOGICAL_SUPERBLOCKS: Final = 512
CHUNK_PAGES: Final = 64
FREE_SHARE: Final = 0.05
AIM: Final = 1.05


@dataclass(frozen=True, slots=True)
class Case:
    """``is_ours``: it follows the rules of docs/device-waf.md, and is held to the aim."""

    name: str
    pattern: SegmentPattern | FilePattern
    is_ours: bool = False

    @property
    def handle_count(self) -> int:
        if isinstance(self.pattern, SegmentPattern) and self.pattern.names_handles:
            return len(self.pattern.classes)
        return 1


def _segments(
    superblocks: float, classes: tuple[LifetimeClass, ...], order: ReclaimOrder, *, names_handles: bool = False
) -> SegmentPattern:
    pages = round(SUPERBLOCK_PAGES * superblocks)
    return SegmentPattern(pages, CHUNK_PAGES, classes, order, FREE_SHARE, names_handles)


def cases() -> tuple[Case, ...]:
    ours = [
        Case(f"ours, one open, {size:g} superblocks, {order.value}", _segments(size, ONE_CLASS, order), is_ours=True)
        for size in (2.7, 5.3)
        for order in (ReclaimOrder.EXPECTED, ReclaimOrder.RANDOM)
    ]
    ours += [
        Case(
            f"ours, 4 classes, 4 handles, {size:g} superblocks, {order.value}",
            _segments(size, FOUR_CLASSES, order, names_handles=True),
            is_ours=True,
        )
        for size in (2.7, 5.3)
        for order in (ReclaimOrder.EXPECTED, ReclaimOrder.RANDOM)
    ]
    against_the_rules = [
        Case(f"segments of {size:g} superblocks, {order.value}", _segments(size, ONE_CLASS, order))
        for size in (0.0625, 0.25, 0.93)
        for order in ReclaimOrder
    ]
    against_the_rules.append(
        Case(
            "segments of 2.7 superblocks, random, none kept free",
            replace(_segments(2.7, ONE_CLASS, ReclaimOrder.RANDOM), free_share=0.0),
        )
    )
    against_the_rules += [
        Case(f"4 classes open, no handles, {order.value}", _segments(2.7, FOUR_CLASSES, order))
        for order in ReclaimOrder
    ]
    theirs = [
        Case("files of 256 KiB, discard", FilePattern(64, 64)),
        Case("files of 256 KiB, no discard", FilePattern(64, 64, discards=False)),
        Case("files of 128 to 384 KiB, discard", FilePattern(32, 96)),
        Case("files of 128 to 384 KiB, no discard", FilePattern(32, 96, discards=False)),
        Case("files of 512 to 1536 KiB, discard", FilePattern(128, 384)),
        Case("files of 512 to 1536 KiB, no discard", FilePattern(128, 384, discards=False)),
        Case("files of 128 to 384 KiB, discard, each synced", FilePattern(32, 96, files_per_commit=1)),
        Case("files of 128 to 384 KiB, discard, no hits", FilePattern(32, 96, hits_per_file=0.0)),
    ]
    return (*ours, *against_the_rules, *theirs)


def amplification(case: Case, over_provisioning: float, seed: int) -> Amplification:
    drive = FlashDrive(
        drive_of(
            logical_superblocks=LOGICAL_SUPERBLOCKS,
            superblock_pages=SUPERBLOCK_PAGES,
            over_provisioning=over_provisioning,
            handle_count=case.handle_count,
        )
    )
    generator = np.random.default_rng(seed)
    if isinstance(case.pattern, SegmentPattern):
        return measure(SegmentWriter(case.pattern, drive, generator), drive, warm_drive_writes=4, drive_writes=1)
    return measure(FileWriter(case.pattern, drive, generator), drive, warm_drive_writes=4, drive_writes=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=1)
@click.option("--over-provisioning", default=0.07, show_default=True, type=click.FloatRange(min=0.04, max=1.0))
@click.option("--only", default="", metavar="TEXT", help="Only cases with this in their name.")
def main(rounds: int, output_format: str, work: Path, over_provisioning: float, only: str) -> None:
    """Flash pages for each host page, in a modelled drive: our segments, the same against the rules, and files."""
    settings: dict[str, Any] = {
        "over_provisioning": over_provisioning, "superblock_pages": SUPERBLOCK_PAGES,
        "logical_superblocks": LOGICAL_SUPERBLOCKS, "chunk_pages": CHUNK_PAGES, "free_share": FREE_SHARE, "only": only,
    }  # fmt: skip

    def run(report: Report, directory: Path, progress: Progress) -> None:
        for case in cases():
            if only not in case.name:
                continue
            seen = [amplification(case, over_provisioning, seed) for seed in range(rounds)]
            series = report.add(case.name, "flash/host", [one.device for one in seen])
            report.details.append(
                {"case": case.name, "flash/payload": seen[0].total, "a drive write earlier": seen[0].earlier}
            )
            progress(f"{case.name}: {series.median:.3f}")
            if case.is_ours and max(series.samples) > AIM:
                report.problems.append(f"{case.name}: {max(series.samples):.3f} is more than {AIM}")

    run_bench("device_waf", work, output_format, settings, run)


if __name__ == "__main__":
    main()
