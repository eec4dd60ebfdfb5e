"""How even the wear of a shelf of drives becomes over five years, by how segments are placed. A simulation.

The shelf: twelve drives of three sizes at 1 DWPD over five years, worn 0 to 30 % at the start; after a year one turns
read-only, after a year and a half one of the most worn is replaced by a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from meshfusion.tools.bench.fleet import (
    HOURS_PER_DAY,
    HOURS_PER_YEAR,
    DriveModel,
    Placement,
    ReadOnly,
    Replaced,
    by_wear,
    least_worn,
    most_free,
    round_robin,
    simulate,
)
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

AIM_POINTS: Final = 2.0
YEARS: Final = 5
WAYS: Final[dict[str, Callable[[], Placement]]] = {
    "ours": by_wear,
    "least worn": least_worn,
    "most free": most_free,
    "round robin": round_robin,
}
# Capacity in GB, and wear in points at the start.
_DRIVES: Final = (
    *((7_680, 0), (7_680, 4), (7_680, 8), (7_680, 12), (7_680, 16), (7_680, 20)),
    *((7_680, 24), (7_680, 30), (15_360, 2), (15_360, 18), (15_360, 28), (3_840, 10)),
)


def _model(index: int, capacity_gb: int, wear_points: float) -> DriveModel:
    """Half of the drives had an earlier life in which their flash wrote two and a half times what hosts did; from now
    on it writes up to 3 % more."""
    model = DriveModel(f"drive {index:02}", (f"enclosure {index // 6}", f"port {index % 2}"), capacity_gb * 10**9)
    before = wear_points / 100 * model.endurance_bytes / (1 if index % 2 else 2.5)
    return DriveModel(
        model.drive_id,
        model.domain,
        model.capacity_bytes,
        wear_points=wear_points,
        bytes_written=round(before),
        write_amplification=1 + 0.01 * (index % 4),
    )


SHELF: Final = tuple(_model(index, *drive) for index, drive in enumerate(_DRIVES))
EVENTS: Final = (
    ReadOnly(HOURS_PER_YEAR, "drive 05"),
    Replaced(HOURS_PER_YEAR * 3 // 2, "drive 07", DriveModel("drive 07 new", SHELF[7].domain, SHELF[7].capacity_bytes)),
)


def capacity_bytes(models: Sequence[DriveModel]) -> int:
    return sum(model.capacity_bytes for model in models)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=1)
@click.option(
    "--drive-writes-per-day", "rates", multiple=True, default=(0.2, 0.4, 0.6), show_default=True,
    type=click.FloatRange(min=0.01, max=1.0), help="Written to the whole shelf each day, in its capacity.",
)  # fmt: skip
def main(rounds: int, output_format: str, work: Path, rates: tuple[float, ...]) -> None:
    """Points between the most and the least worn drive after five years. Rounds are alike: nothing is drawn."""

    def run(report: Report, directory: Path, progress: Progress) -> None:
        for rate in rates:
            for name, way in WAYS.items():
                hourly = capacity_bytes(SHELF) * rate / HOURS_PER_DAY
                history = simulate(SHELF, way(), years=YEARS, written_bytes_per_hour=hourly, events=EVENTS)
                report.add(f"{name}, {rate:g} writes a day", "points", [history.spread_points[-1]] * rounds)
                yearly = {f"after {year} y": history.spread_points[year * 365 - 1] for year in range(1, YEARS + 1)}
                within = history.level_after_days(AIM_POINTS)
                report.details.append(
                    {"way": name, "writes a day": rate, **yearly, "within the aim after days": within,
                     "refused": history.refused}
                )  # fmt: skip
                progress(f"{name} at {rate:g}: {history.spread_points[-1]:.1f} points")

    settings: dict[str, Any] = {"drives": len(SHELF), "years": YEARS, "drive_writes_per_day": list(rates)}
    run_bench("fleet_wear", work, output_format, settings, run)


if __name__ == "__main__":
    main()
