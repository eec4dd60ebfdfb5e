"""``mfctl config``: check, example."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.output import format_option, print_document

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServiceConfig

PATH = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step


@click.group()
def config() -> None:
    """Check configurations, and print one to start from."""


@config.command()
@click.argument("file", type=PATH)
@click.option("--connector", is_flag=True, help="FILE is vLLM's --kv-transfer-config, or its extra config alone.")
@format_option
def check(file: Path, connector: bool, output_format: str) -> None:
    """Check FILE (YAML or JSON) and tell every problem at once.

    A pool that exists is looked at beside whoever owns it; for one to be created, the room is. What the service would
    refuse is an error; what it would start with, but not be whole, such as a drive that is away, is a warning.
    """
    from meshfusion.dpu.config import examine_service_config, read_config_file
    from meshfusion.dpu.config_access import expiry_notes

    # What opening the pool's drives logs is told as warnings.
    logging.getLogger("meshfusion").addHandler(logging.NullHandler())
    document = read_config_file(file)
    if connector:
        from meshfusion.tools.mfctl.connector_config import check_connector_config

        notes, warnings = check_connector_config(document, str(file))
    elif isinstance(document.data, dict) and any(str(key).startswith("kv_") for key in document.data):
        raise ConfigError(
            f"{file}: is an engine's kv_transfer_config, not a configuration of the service",
            next_step=f"mfctl config check --connector {file}",
        )
    else:
        checked, warnings = examine_service_config(file, document)
        of_pools = (note for served in checked.served for note in served.notes)
        notes = (*of_pools, *expiry_notes(checked.tls), *_notes_of_root(checked))
    if output_format != "table":
        print_document({"file": str(file), "ok": True, "notes": notes, "warnings": warnings}, output_format)
    else:
        for warning in warnings:
            click.echo(f"warning: {warning}")
        for note in notes:
            click.echo(f"note: {note}")
        click.echo(f"{file}: ok")


def _notes_of_root(checked: ServiceConfig) -> tuple[str, ...]:
    """What root may read says nothing of what the service's user may, whose alone such files are to be. With the
    kernel's target, the service is root's."""
    is_roots = checked.exports is not None and checked.exports.target == "nvmet"
    has_secrets = checked.tls is not None or checked.tokens_file is not None
    if os.geteuid() != 0 or is_roots or not has_secrets:
        return ()
    return (
        "checked as root, who may read every file: where the service runs as another user, check as that one, too: "
        "runuser -u USER -- mfctl config check FILE",
    )


@config.command()
@format_option
def example(output_format: str) -> None:
    """Print a documented configuration of the service, with its defaults."""
    from meshfusion.dpu.config_example import example_service_config

    text = example_service_config()
    if output_format == "json":
        import yaml

        click.echo(json.dumps(yaml.safe_load(text), indent=2))
    else:
        click.echo(text, nl=False)  # YAML, with its comments
