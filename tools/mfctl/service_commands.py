"""``mfctl service``: ``run``, which is also the ``meshfusion`` daemon, and what is asked of one that runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_option, format_seconds, print_document, print_fields, print_table
from meshfusion.tools.mfctl.progress import told_when_interrupted
from meshfusion.tools.mfctl.service_source import running_service_options, running_services, service_admin
from meshfusion.tools.mfctl.unit_command import unit

if TYPE_CHECKING:
    from meshfusion.dpu.api.service_types import ServiceState
    from meshfusion.tools.mfctl.context_choice import Services
    from meshfusion.tools.mfctl.context_types import Member

_ANSWER_S = 5.0


@click.group()
def service() -> None:
    """Run the chunk service, and look after it."""


@service.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, readable=False),
    required=True,
    metavar="FILE",
    help="Configuration file (YAML).",
)
@click.option(
    "--takeover",
    is_flag=True,
    help="Take drives from the service of another machine that has them reserved: it is certainly dead, or to be cut "
    "off.",
)
@format_option
def run(config_path: Path, takeover: bool, output_format: str) -> None:
    """Serve a pool to the engines of this machine until SIGTERM or SIGINT.

    Prints one line on stdout when ready; the log goes to stderr.
    """
    from meshfusion.dpu.config import load_service_config
    from meshfusion.tools.mfctl.daemon import run_service

    as_json = output_format != "table"  # on one line, which JSON is, and YAML too
    config = load_service_config(config_path)
    run_service(config, config_path=config_path, ready_as_json=as_json, may_take_over=takeover)


@service.command()
@running_service_options
@format_option
def status(address: str | None, config_path: Path | None, output_format: str) -> None:
    """Tell how the running service stands: version, process, whether it drains, and what is open.

    Of a context that lists several services all are shown, and it does not exit with 0 when one did not answer.
    """
    services = running_services(address, config_path)
    if services.is_cluster:
        _print_states(services, output_format)
        return
    found = _state_of(services.only)
    if output_format != "table":
        print_document(_as_document(found), output_format)
        return
    rows = [("version", found.version), ("process", found.pid), ("up", format_seconds(found.uptime_s))]
    rows += [("phase", found.phase.value), ("writes open", found.open_write_count)]
    print_fields([*rows, ("leases open", found.open_lease_count)])


def _state_of(member: Member) -> ServiceState:
    with service_admin(member.address) as admin:
        return admin.state(deadline_s=_ANSWER_S)


def _print_states(services: Services, output_format: str) -> None:
    from meshfusion.tools.mfctl.cluster import ask_all, end_with_errors, print_answers, tell_errors
    from meshfusion.tools.mfctl.cluster_status import STATE_HEADERS, state_row

    answers = ask_all(services.members, _state_of, within_s=_ANSWER_S + 1.0)
    if output_format != "table":
        print_answers(services, answers, _as_document, output_format)
    else:
        print_table(STATE_HEADERS, map(state_row, answers))
        tell_errors(answers)
    end_with_errors(answers)


@service.command()
@running_service_options
@click.option(
    "--deadline",
    "within_s",
    type=FiniteRange(0, 86_400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="What is open may end in this time; then the service stops all the same.",
)
@format_option
def drain(address: str | None, config_path: Path | None, within_s: float, output_format: str) -> None:
    """Let engines end what they have open, then stop the service; returns when it has stopped.

    From now on the service refuses engines that attach and chunks to be saved; lookups, commits and releases are
    answered until the last write is committed or given back and the last lease has ended. Engines go on without the
    pool and attach again when it is back. Started by systemd, the service stays stopped until it is started again.
    Exits 1 when the deadline passed while something was open. The service must be named on the line, be it by
    mfctl --context NAME: the current context is not taken. Interrupted, this looks on no longer; the drain goes on.
    """
    from meshfusion.tools.mfctl.service_drain import drain_service

    def told(state: ServiceState) -> None:
        if output_format == "table":
            open_now = f"{state.open_write_count} writes and {state.open_lease_count} leases are open"
            click.echo(f"{open_now}, {state.remaining_s:.0f} s left", err=True)

    services = running_services(address, config_path, must_be_named=True)
    at = services.only.address
    goes_on = told_when_interrupted(
        "the service drains on if it was told to, and then stops",
        next_step=f"mfctl service status --service {at} tells; it cannot be called off.",
    )
    with goes_on, service_admin(at) as admin:
        last = drain_service(admin, within_s, told, now_s=time.monotonic)
    if output_format != "table":
        print_document(_as_document(last), output_format)
    elif last.phase.is_last:
        click.echo(f"{last.phase.value}, and stopped")
    else:
        click.echo("stopped")
    if last.open_write_count or last.open_lease_count:
        raise click.exceptions.Exit(1)


@service.command()
@running_service_options
@format_option
def reload(address: str | None, config_path: Path | None, output_format: str) -> None:
    """Let the running service read its configuration anew, as SIGHUP does.

    What can be changed while it serves is changed at once; the rest is named, and needs a restart. When anything is
    wrong with the file, all of it is told and nothing changes.
    """
    services = running_services(address, config_path)
    with service_admin(services.only.address) as admin:
        report = admin.reload(deadline_s=30.0)
    if output_format != "table":
        print_document(report, output_format)
        return
    for change in report.applied:
        click.echo(f"applied: {change.key} is {change.after} (was {change.before})")
    for change in report.needs_restart:
        click.echo(f"needs a restart: {change.key} is {change.before}, and {change.after} in the file")
    if not (report.applied or report.needs_restart):
        click.echo("nothing has changed")


service.add_command(unit)


def _as_document(state: ServiceState) -> dict[str, object]:
    import dataclasses

    return dataclasses.asdict(state) | {"phase": state.phase.value}
