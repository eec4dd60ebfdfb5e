"""Our initiator, the kernel's and the package ``nvmeof``: reads over soft-RoCE from one target, in a guest.

Emulation says nothing of real devices' speed, but which of three pieces of software costs more it does say.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench
from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import CONSOLE_LOG, GuestRun, run_guest

GUEST_SCRIPT = Path(__file__).with_name("rdma_guest.py")
SIZES_BYTES = (128 << 10, 1 << 20)
DEPTHS = (1, 8, 32)
OURS = "ours"
INITIATORS = (OURS, "kernel", "nvmeof")
COMMAND_KEYS = "ours, a key for each command"
DEADLINE_S = 900.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=3)
@click.option("--seconds", default=1.0, show_default=True, help="Of each measurement.")
@click.option("--keys", is_flag=True, help="Compare ours with itself with a key for each command, with nothing else.")
def main(rounds: int, output_format: str, work: Path, seconds: float, keys: bool) -> None:
    """MB/s and processor seconds a GiB of three initiators, or of ours with either scope of keys."""
    names = (OURS, COMMAND_KEYS) if keys else INITIATORS

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        cases = [(size, depth) for size in SIZES_BYTES for depth in DEPTHS]
        progress(f"{rounds} rounds of {len(names) * len(cases)} measurements, in a guest")
        command = (sys.executable, str(GUEST_SCRIPT), "--rounds", str(rounds), "--seconds", str(seconds))
        tail = OutputTail(1 << 20)
        listed = ",".join(f"{size}:{depth}" for size, depth in cases)
        choice = ("--cases", listed, "--initiators", ";".join(names))
        run = GuestRun((*command, *choice), output_directory=directory, deadline_s=DEADLINE_S)
        result = run_guest(run, sink=tail, note=progress)
        if result.exit_code:
            raise ServiceError(
                f"the guest's part ended with {result.exit_code}: {tail.stderr[-500:]}",
                next_step=f"read {directory / CONSOLE_LOG}",
            )
        rows = json.loads(tail.stdout)
        for size, depth in cases:
            what = f"{size >> 10} KiB, {depth} at a time"
            for unit, key in (("MB/s", "mb_per_s"), ("CPU s/GiB", "cpu_s_per_gib")):
                series = {
                    name: report.add(
                        f"{name}: {what}",
                        unit,
                        [r[key] for r in rows if (r["initiator"], r["size_bytes"], r["depth"]) == (name, size, depth)],
                    )
                    for name in dict.fromkeys(row["initiator"] for row in rows)
                }
                for name, other in series.items():
                    if name != OURS:
                        report.compare(series[OURS], other)

    run_bench("rdma", work, output_format, {"rounds": rounds, "seconds": seconds, "keys": keys}, measure)


if __name__ == "__main__":
    main()
