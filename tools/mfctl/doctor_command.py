"""``mfctl doctor``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.tools.mfctl.output import EXIT_FAILURE, format_option, print_document, print_table

if TYPE_CHECKING:
    from meshfusion.tools.mfctl.findings import Finding


@click.command()
@click.option(
    "--pool",
    type=click.Path(path_type=Path, readable=False),
    help="Also look at the place of this pool, existing or not.",
)
@format_option
def doctor(pool: Path | None, output_format: str) -> None:
    """Look for what would keep MeshFusion from working on this machine. Exits 1 when something fails."""
    from meshfusion.tools.mfctl.doctor import examine
    from meshfusion.tools.mfctl.findings import State

    findings = list(examine(pool))
    failed = [f for f in findings if f.state is State.FAIL]
    if output_format != "table":
        checks = [{"check": f.check, "state": f.state.value, "cause": f.cause, "remedy": f.remedy} for f in findings]
        print_document({"ok": not failed, "checks": checks}, output_format)
    else:
        print_table(["STATE", "CHECK", "FOUND"], [row for f in findings for row in _rows(f)])
        remedies = [f for f in findings if f.remedy]
        if remedies:
            click.echo()
            print_table(["STATE", "CHECK", "WHAT TO DO"], [(f.state.value, f.check, f.remedy) for f in remedies])
    if failed:
        sys.exit(EXIT_FAILURE)


def _rows(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """One for each line of what was found."""
    first, *others = finding.cause.splitlines() or [""]
    yield finding.state.value, finding.check, first
    yield from (("", "", line) for line in others)
