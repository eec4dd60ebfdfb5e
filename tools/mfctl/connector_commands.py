"""``mfctl connector``: config."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.tools.mfctl.exit_codes import EXIT_FAILURE
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_option, print_document, print_table

if TYPE_CHECKING:
    from meshfusion.tools.mfctl.connector_snippet import Snippet
    from meshfusion.tools.mfctl.findings import Finding

_ENGINES: Final = ("vllm", "sglang")
_FILE: Final = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step


@click.group()
def connector() -> None:
    """What engines need to know to use a service."""


@connector.command("config")
@click.option(
    "--config", "config_file", type=_FILE, metavar="FILE",
    help="The service's configuration: tells its address, tenants and exports, and what it asks of callers.",
)  # fmt: skip
@click.option(
    "--service", "address", metavar="ADDRESS",
    help="At which engines reach the service, unix:///path or host:port. With --config: where that is not what it "
    "listens on.",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(_ENGINES), default="vllm", show_default=True, help="Which engine it is for."
)
@click.option("--tenant", metavar="NAME", help="Whose engine it is; without it default.")
@click.option(
    "--check", is_flag=True,
    help="Also ask the engine that is installed here, in a process of its own, and look at the files that are named: "
    "for the engine's host.",
)  # fmt: skip
@click.option(
    "--timeout", "deadline_s", type=FiniteRange(1, 3600), default=180, show_default=True, metavar="SECONDS",
    help="With --check: how long the engine may take to answer.",
)  # fmt: skip
@format_option
def config(
    config_file: Path | None, address: str | None, engine: str, tenant: str | None, check: bool, deadline_s: float,
    output_format: str,
) -> None:  # fmt: skip
    """Write the configuration with which an engine uses a service.

    Prints vLLM's --kv-transfer-config, and the line of the shell with it. What the engine shows to the service is named
    before the command, as for all commands (mfctl --service-ca FILE --service-certificate FILE ... connector config),
    and is the engine's: paths are those of its host. The connector's own check of its configuration is always made.

    Exits 1 when no engine could use the service like this, when the installed engine does not take it (--check), and
    for SGLang, for which there is no connector yet.
    """
    if config_file is None and address is None:
        raise click.UsageError("Name the service: --config FILE, --service ADDRESS, or both.")
    if engine == "sglang":
        raise UnsupportedError(
            "there is no connector for SGLang in this version: no configuration would make it use the service",
            next_step="Use vLLM (--engine vllm), or run SGLang without MeshFusion.",
        )
    made = _snippet(config_file, address, tenant)
    findings = _check(made, deadline_s) if check else ()
    if output_format == "table":
        _print(made, findings)
    else:
        _print_object(made, findings, output_format)
    if _failed(findings):
        sys.exit(EXIT_FAILURE)


def _snippet(config_file: Path | None, address: str | None, tenant: str | None) -> Snippet:
    from meshfusion.tools.mfctl.config_model import config_alone
    from meshfusion.tools.mfctl.connector_snippet import snippet_of_address, snippet_of_config
    from meshfusion.tools.mfctl.service_access import given_access_to

    if config_file is not None:
        return snippet_of_config(config_alone(config_file), address, tenant, given_access_to)
    assert address is not None, "one of them is named"
    return snippet_of_address(address, tenant, given_access_to)


def _check(made: Snippet, deadline_s: float) -> tuple[Finding, ...]:
    from meshfusion.tools.engine_check import check_engine

    click.echo("asking the installed engine ...", err=True)
    return (*_check_files(made), *check_engine(made.transfer, deadline_s=deadline_s))


def _check_files(made: Snippet) -> tuple[Finding, ...]:
    from meshfusion.dpu.api.security.client_security import check_client_files
    from meshfusion.host.connector.config import EXTRA_CONFIG, parse_connector_config
    from meshfusion.tools.mfctl.findings import Finding, State

    security = parse_connector_config(made.transfer[EXTRA_CONFIG]).security
    notes, problems = check_client_files(security, datetime.now(UTC))
    found = [
        Finding(security.label(p.field), State.FAIL, f"{getattr(security, p.field)} {p.problem}", p.fix)
        for p in problems
    ]
    return (*found, *(Finding("certificates", State.WARN, note, "Renew it.") for note in notes))


def _failed(findings: tuple[Finding, ...]) -> bool:
    return any(finding.state.value == "fail" for finding in findings)


def _print(made: Snippet, findings: tuple[Finding, ...]) -> None:
    click.echo(made.text)
    click.echo()
    click.echo(made.command)
    if findings:
        click.echo()
        print_table(["STATE", "CHECK", "FOUND"], [(f.state.value, f.check, f.cause) for f in findings])
        for finding in findings:
            if finding.remedy:
                click.echo(f"{finding.check}: {finding.remedy}")
    for note in made.notes:
        click.echo(f"note: {note}", err=True)


def _print_object(made: Snippet, findings: tuple[Finding, ...], output_format: str) -> None:
    checks = [{"check": f.check, "state": f.state.value, "cause": f.cause, "remedy": f.remedy} for f in findings]
    print_document(
        {
            "kv_transfer_config": made.transfer, "command": made.command, "notes": made.notes,
            "ok": not _failed(findings), "checks": checks,
        },
        output_format,
    )  # fmt: skip
