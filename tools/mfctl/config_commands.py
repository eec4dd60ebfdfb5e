"""``mfctl config``: check, example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.output import format_option, print_json

PATH = click.Path(path_type=Path)


@click.group()
def config() -> None:
    """Check configurations, and print one to start from."""


@config.command()
@click.argument("file", type=PATH)
@click.option("--connector", is_flag=True, help="FILE is vLLM's --kv-transfer-config, or its extra config alone.")
@format_option
def check(file: Path, connector: bool, output_format: str) -> None:
    """Check FILE (YAML or JSON) and tell every problem at once."""
    from meshfusion.dpu.yaml_document import read_yaml

    if connector:
        from meshfusion.host.connector.config import parse_connector_config

        parse_connector_config(_extra_config(read_yaml(file).data, file))
    else:
        from meshfusion.dpu.config import load_service_config

        load_service_config(file)
    if output_format == "json":
        print_json({"file": str(file), "ok": True})
    else:
        click.echo(f"{file}: ok")


def _extra_config(data: Any, file: Path) -> Any:
    """The connector's own part of a kv_transfer_config; checks what the engine needs around it."""
    if not isinstance(data, dict) or not any(str(key).startswith("kv_") for key in data):
        return data
    problems = []
    if not data.get("kv_connector"):
        problems.append("kv_connector is missing; add the connector's class name")
    if data.get("kv_role") not in ("kv_both", "kv_producer", "kv_consumer"):
        problems.append(f"kv_role = {data.get('kv_role')!r} must be kv_both, kv_producer or kv_consumer; use kv_both")
    extra = data.get("kv_connector_extra_config") or {}
    policy, forced = (
        data.get("kv_load_failure_policy"),
        isinstance(extra, dict) and extra.get("force_load_failure_policy"),
    )
    if policy != "recompute" and forced is not True:
        problems.append(f"kv_load_failure_policy = {policy!r} must be recompute, so that a failed load costs only time")
    if problems:
        raise ConfigError(f"{file}: {'; '.join(problems)}", next_step="Correct these fields of the kv_transfer_config.")
    return extra


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
        click.echo(text, nl=False)
