"""A benchmark's result: every sample, medians, ratios; as a table for people or one JSON object."""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.bench.machine import ROOT, machine_facts

Command = TypeVar("Command", bound=Callable[..., Any])
Measure = Callable[["Report", Path, "Progress"], None]


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one thing, in the order of the rounds."""

    name: str
    unit: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One series divided by another: of the medians, and round by round."""

    name: str
    of_medians: float
    pairwise: tuple[float, ...]

    @classmethod
    def of(cls, over: Series, under: Series) -> Ratio:
        pairs = tuple(a / b for a, b in zip(over.samples, under.samples, strict=True))
        return cls(f"{over.name} / {under.name}", over.median / under.median, pairs)


@dataclass(slots=True)
class Report:
    """``details``: whatever else was seen, a flat mapping each. ``problems``: why the numbers must not be used."""

    bench: str
    machine: dict[str, str]
    settings: dict[str, Any]
    series: list[Series] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, samples: list[float]) -> Series:
        series = Series(name, unit, tuple(samples))
        self.series.append(series)
        return series

    def compare(self, over: Series, under: Series) -> None:
        self.ratios.append(Ratio.of(over, under))

    def to_json(self) -> str:
        body = asdict(self)
        for written, series in zip(body["series"], self.series, strict=True):
            written["median"] = series.median
        return json.dumps(body)


class Progress:
    """Lines on standard error, each with the seconds since the start."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_s:7.1f} s] {text}", file=sys.stderr, flush=True)


def bench_options(rounds: int) -> Callable[[Command], Command]:
    """The options every benchmark has: ``--rounds``, ``--format`` and ``--work``."""

    def decorate(command: Command) -> Command:
        options = [
            click.option(
                "--rounds",
                default=rounds,
                show_default=True,
                type=click.IntRange(min=1),
                help="How often all is measured; what is compared alternates.",
            ),
            click.option(
                "--format",
                "output_format",
                type=click.Choice(["table", "json"]),
                default="table",
                show_default=True,
                help="What to print: a table for people, or JSON for programs.",
            ),
            click.option(
                "--work",
                type=click.Path(path_type=Path, file_okay=False),
                default=ROOT / ".cache" / "bench",
                help="Directory for pools and logs, on the filesystem to be measured.  [default: .cache/bench]",
            ),
        ]
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def run_bench(
    name: str,
    work: Path,
    output_format: str,
    settings: dict[str, Any],
    measure: Measure,
) -> None:
    """Run ``measure`` in the empty directory ``work/name`` and print its report. Exits 1 where it found problems."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are ended, too
    directory = (work / name).absolute()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    report = Report(name, machine_facts(directory), settings)
    try:
        measure(report, directory, Progress())
    except MeshFusionError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if output_format == "json":
        click.echo(report.to_json())
    else:
        _print_tables(report)
    for problem in report.problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    sys.exit(1 if report.problems else 0)


def _print_tables(report: Report) -> None:
    console = Console(width=max(Console().width, 120))
    console.print(f"[bold]{report.bench}[/]  " + escape("  ".join(f"{k}={v}" for k, v in report.settings.items())))
    console.print("  ".join(f"{k}: {v}" for k, v in report.machine.items()), style="dim", markup=False)
    if report.series:
        table = Table("what", "unit", "median", "samples")
        for series in report.series:
            table.add_row(series.name, series.unit, _number(series.median), _numbers(series.samples))
        console.print(table)
    if report.ratios:
        table = Table("ratio", "of medians", "round by round")
        for ratio in report.ratios:
            table.add_row(ratio.name, _number(ratio.of_medians), _numbers(ratio.pairwise))
        console.print(table)
    for detail in report.details:
        console.print("  ".join(f"{k}={_text(v)}" for k, v in detail.items()), style="dim", markup=False)


def _text(value: object) -> str:
    return _number(value) if isinstance(value, float) else str(value)


def _numbers(values: tuple[float, ...]) -> str:
    return "  ".join(_number(value) for value in values)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
