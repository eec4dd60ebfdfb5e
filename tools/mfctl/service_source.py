"""Which running service a command is about, and its administration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meshfusion.tools.mfctl.context_choice import Services, chosen_services, refuse_beside_context
from meshfusion.tools.mfctl.context_types import Member
from meshfusion.tools.mfctl.service_access import access_to, calling
from meshfusion.tools.mfctl.sources import explained, service_option

if TYPE_CHECKING:
    from meshfusion.dpu.api.service_client import GrpcServiceAdmin

F = TypeVar("F", bound=Callable[..., Any])


def running_service_options(command: F) -> F:
    """Adds ``--service`` and ``--config``: of the running service, one of them."""
    command = click.option(
        "--config", "config_path", type=click.Path(path_type=Path, readable=False), metavar="FILE",
        help="The running service is the one of this configuration.",
    )(command)  # fmt: skip
    return service_option("The running service is at unix:///path or host:port.")(command)


def running_services(address: str | None, config_path: Path | None, *, must_be_named: bool = False) -> Services:
    """Raises click.UsageError unless one is told in one way, and what loading the configuration or contexts raises.

    ``must_be_named``: the current context is not enough, since nothing on the line says which it is.
    """
    if address is not None and config_path is not None:
        raise click.UsageError("Name the running service by either --service ADDRESS or --config FILE.")
    if config_path is not None:
        refuse_beside_context("--config")
        found = _address_in(config_path)
        return Services((Member(found, found),))
    services = None
    if address is not None or calling().context_name is not None or not must_be_named:
        services = chosen_services(address)
    if services is None:
        context = "mfctl --context NAME" if must_be_named else "a context (mfctl context use NAME)"
        raise click.UsageError(f"Name the running service, by either --service ADDRESS or --config FILE, or {context}.")
    return services


def _address_in(config_path: Path) -> str:
    from meshfusion.dpu.api.doors import nearest
    from meshfusion.dpu.owner_lock import served_at
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.tools.mfctl.config_model import config_alone

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
