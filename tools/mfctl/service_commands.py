"""``mfctl service run``, which is also the ``meshfusion`` daemon."""

from __future__ import annotations

from pathlib import Path

import click

from meshfusion.tools.mfctl.output import format_option


@click.group()
def service() -> None:
    """Run the chunk service."""


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
    run_service(load_service_config(config_path), ready_as_json=as_json, may_take_over=takeover)
