"""``mfctl doctor``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.tools.mfctl.exit_codes import EXIT_FAILURE
from meshfusion.tools.mfctl.output import format_option, print_document, print_table

if TYPE_CHECKING:
    from meshfusion.tools.mfctl.findings import Finding


@click.command()
@click.argument("path", type=click.Path(path_type=Path, readable=False), required=False)
@click.option(
    "--role", "role_name", type=click.Choice(["host", "dpu", "jbof"]), show_default="what the machine looks like",
    help="Of engines (host), the card that exports drives (dpu), or a server of drives (jbof).",
)  # fmt: skip
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path, readable=False), metavar="FILE",
    help="Also look at what this configuration of the service needs: modules, huge pages, ports, certificates.",
)  # fmt: skip
@format_option
def doctor(path: Path | None, role_name: str | None, config_path: Path | None, output_format: str) -> None:
    """Look for what would keep MeshFusion from working on this machine, or make it slow; also at the pool in PATH, or
    the place of one that is to be made.

    Software and pool, kernel and modules, huge pages, RDMA devices, their links and MTU, the ways to GPUs' memory and
    how near they are, the clock, versions, and with --config ports and certificates. What is "unseen" could not be
    looked at from here, and is not known to be well. Nothing is changed. Exits 1 when something fails.
    """
    from meshfusion.tools.doctor.role import Role
    from meshfusion.tools.mfctl.doctor_machine import examine_here
    from meshfusion.tools.mfctl.findings import State

    findings = list(examine_here(path, None if role_name is None else Role(role_name), config_path))
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
