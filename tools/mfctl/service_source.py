"""Which running service a command is about, and its administration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshfusion.tools.mfctl.service_access import access_to
from meshfusion.tools.mfctl.sources import explained

if TYPE_CHECKING:
    from meshfusion.dpu.api.service_client import GrpcServiceAdmin

F = TypeVar("F", bound=Callable[..., Any])


def running_service_options(command: F) -> F:
    """Adds ``--service`` and ``--config``: of the running service, one of them."""
    command = click.option(
        "--config", "config_path", type=click.Path(path_type=Path, readable=False), metavar="FILE",
        help="The running service is the one of this configuration.",
    )(command)  # fmt: skip
    return click.option(
        "--service", "address", metavar="ADDRESS", help="The running service is at unix:///path or host:port."
    )(command)


def address_of(address: str | None, config_path: Path | None) -> str:
    """Raises click.UsageError unless exactly one is given, and what loading the configuration raises."""
    if (address is None) == (config_path is None):
        raise click.UsageError("Name the running service, by either --service ADDRESS or --config FILE.")
    if address is not None:
        return address
    from meshfusion.dpu.api.doors import nearest
    from meshfusion.dpu.owner_lock import served_at
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.tools.mfctl.config_model import config_alone

    assert config_path is not None
    # Alone: a certificate that has expired keeps nobody from draining the service that has it.
    config = config_alone(config_path)
    # Where it is served may have been changed in the file since.
    places = (served_at(PoolLayout(served.pool.path)) for served in config.served)
    return next(filter(None, places), str(nearest(config.addresses)))


@contextmanager
def service_admin(address: str) -> Iterator[GrpcServiceAdmin]:
    from meshfusion.dpu.api.service_client import GrpcServiceAdmin

    admin = GrpcServiceAdmin(address, access_to(address))
    try:
        with explained(address):
            yield admin
    finally:
        admin.close()
