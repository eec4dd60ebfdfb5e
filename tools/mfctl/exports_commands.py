"""``mfctl exports``: what is done to the hosts that reach a pool over NVMe-oF."""

from __future__ import annotations

from pathlib import Path

import click

from meshfusion.tools.mfctl.exit_codes import EXIT_FAILURE
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_option, print_document, print_table
from meshfusion.tools.mfctl.service_source import running_service_options, running_services, service_admin


@click.group()
def exports() -> None:
    """Look after the exports of the running service."""


@exports.command()
@running_service_options
@click.option("--pool", "pool_name", default="", metavar="NAME", help="Of this pool only, where there are several.")
@click.option("--holder", "holder_id", default="", metavar="ID", help="Of this engine only, as in `mfctl pool status`.")
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(0, 10),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Engines learn of their keys with the next heartbeat.",
)
@format_option
def rekey(
    address: str | None, config_path: Path | None, pool_name: str, holder_id: str, wait_s: float, output_format: str
) -> None:
    """Give engines new keys for their NVMe-oF connections, without ending one.

    From then on nobody connects with the former key. Who is connected stays connected, also with a key that has leaked:
    restarting the engine ends its connections and its key. An engine of a release that takes no new keys keeps the one
    that it has. Exits 1 unless all had their new keys in time.
    """
    from meshfusion.dpu.api.service_types import KeyChange, ReplaceKeysRequest

    with service_admin(running_services(address, config_path, must_be_named=True).only.address) as admin:
        request = ReplaceKeysRequest(pool_name, holder_id, wait_s)
        replaced = admin.replace_keys(request, deadline_s=wait_s + 20.0)
    if output_format != "table":
        print_document(
            {"keys": [{"holder_id": one.holder_id, "change": one.change.value} for one in replaced]}, output_format
        )
    elif replaced:
        print_table(("HOLDER", "NEW KEY"), ((one.holder_id, one.change.value) for one in replaced))
    else:
        click.echo("no engine reaches the exports")
    if any(one.change is not KeyChange.DONE for one in replaced):
        raise click.exceptions.Exit(EXIT_FAILURE)
