"""``mfctl path``: list, disable, enable, test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.context_choice import chosen_services
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_bytes, format_option, print_document, print_table
from meshfusion.tools.mfctl.sources import service_option

if TYPE_CHECKING:
    from meshfusion.host.path.flexpath.page import Page
    from meshfusion.host.path.flexpath.report import PathReport
    from meshfusion.tools.mfctl.path_trial import Outcome

_MAX_MEMORY_BYTES = 1 << 30

pid_option = click.option("--pid", type=click.IntRange(1), metavar="PID", help="Only of the engine process PID.")


@click.group()
def path() -> None:
    """See, try and disable the RDMA paths of engines. A path is a local port and a target's portal."""


@path.command("list")
@pid_option
@format_option
def list_command(pid: int | None, output_format: str) -> None:
    """Show the paths of this user's engines on this machine, as of the last second."""
    from meshfusion.host.path.flexpath.page import page_object
    from meshfusion.tools.mfctl.engine_paths import engine_paths

    found = engine_paths()
    pages = found.pages(pid)
    if output_format != "table":
        print_document({"engines": [page_object(page) for page in pages]}, output_format)
        return
    print_table(
        ["PID", "POOL", "PATH", "STATE", "RATE", "LATENCY", "UNDER WAY", "READ", "WRITTEN", "SEEN", "LAST ERROR"],
        [_row(page, report) for page in pages for report in page.paths],
    )
    if not pages:
        click.echo(f"no engine shows paths in {found.folder}", err=True)


def _row(page: Page, report: PathReport) -> tuple[object, ...]:
    speed = ("-", "-")
    if report.is_measured:
        speed = (f"{report.bandwidth_bytes_per_s / 1e6:.0f} MB/s", f"{report.latency_s * 1e3:.2f} ms")
    return (
        *(page.pid, page.pool_uuid, report.name, "disabled" if report.is_disabled else report.state.value, *speed),
        *map(format_bytes, (report.outstanding_bytes, report.read_bytes, report.written_bytes)),
        *(f"{max(0.0, time.time() - page.written_s):.0f} s ago", report.last_error),
    )


@path.command()
@click.argument("name")
@pid_option
@format_option
def disable(name: str, pid: int | None, output_format: str) -> None:
    """Let engines begin nothing new on the path NAME, as `mfctl path list` shows it.

    What is under way on it ends by itself. It stays disabled until it is enabled or the engine ends. Without any path
    that is left, an engine recomputes.
    """
    _change(name, pid, output_format, is_disabled=True)


@path.command()
@click.argument("name")
@pid_option
@format_option
def enable(name: str, pid: int | None, output_format: str) -> None:
    """Let engines use the path NAME again."""
    _change(name, pid, output_format, is_disabled=False)


def _change(name: str, pid: int | None, output_format: str, *, is_disabled: bool) -> None:
    from meshfusion.tools.mfctl.engine_paths import engine_paths

    engines = engine_paths()
    pages = engines.with_path(name, pid)
    for page in pages:
        engines.order(page, name, is_disabled=is_disabled)
    pids = [page.pid for page in pages]
    engines.wait_until(name, pids, is_disabled=is_disabled)
    if output_format != "table":
        print_document({"path": name, "is_disabled": is_disabled, "pids": pids}, output_format)
    else:
        click.echo(f"{'disabled' if is_disabled else 'enabled'} {name} in PID {', '.join(map(str, pids))}")


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    from meshfusion.jbof.sizes import parse_size_bytes

    try:
        return parse_size_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@path.command()
@service_option("The service, at unix:///path or host:port; without it that of the context.")
@click.option(
    "--seconds", type=FiniteRange(0.1, 600), default=2.0, show_default=True, metavar="SECONDS",
    help="How long to read over each path.",
)  # fmt: skip
@click.option(
    "--size", "size_bytes", callback=_size, default="1MiB", show_default=True, metavar="SIZE", help="Of one read."
)
@click.option(
    "--depth", type=click.IntRange(1, 1024), default=8, show_default=True, metavar="COUNT", help="Reads at a time."
)
@click.option(
    "--tenant", default=DEFAULT_TENANT, show_default=True, metavar="NAME", help="Whose pool, where there are several."
)
@format_option
def test(address: str | None, seconds: float, size_bytes: int, depth: int, tenant: str, output_format: str) -> None:
    """Connect to a service's target over each path alone, and read from the pool. Nothing is written.

    Attaches as a holder of its own, and needs no engine. Exits 1 when a path does not work.
    """
    from meshfusion.tools.mfctl.path_trial import ReadLoad, try_paths

    if size_bytes * depth > _MAX_MEMORY_BYTES:
        raise click.UsageError(f"--size times --depth is more than {format_bytes(_MAX_MEMORY_BYTES)}.")
    services = chosen_services(address)
    if services is None:
        raise click.UsageError("Name the service, by --service ADDRESS or a context: mfctl context use NAME.")
    outcomes = try_paths(services.only.address, ReadLoad(seconds, size_bytes, depth), tenant=tenant)
    if output_format != "table":
        print_document({"paths": outcomes}, output_format)
    else:
        print_table(
            ["LOCAL PORT", "PORTAL", "RATE", "MEDIAN", "P99", "RESULT"], [_outcome_row(outcome) for outcome in outcomes]
        )
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        raise MeshFusionError(
            f"{len(failed)} of {len(outcomes)} paths do not work; {failed[0].local_port} to {failed[0].portal}: "
            f"{failed[0].error}",
            next_step=failed[0].next_step,
        )


def _outcome_row(outcome: Outcome) -> tuple[object, ...]:
    if outcome.error:
        return (outcome.local_port, outcome.portal, "-", "-", "-", outcome.error)
    rate = f"{outcome.bytes_per_s / 1e6:.0f} MB/s"
    return (
        *(outcome.local_port, outcome.portal, rate),
        *(f"{seconds * 1e3:.2f} ms" for seconds in (outcome.median_s, outcome.p99_s)),
        "works",
    )
