"""Which services a command is about: those that it names, or those of the context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.context_types import NAME_PATTERN, Member
from meshfusion.tools.mfctl.service_access import calling


@dataclass(frozen=True, slots=True)
class Services:
    """``is_cluster``: answers are told by the names of services. ``context``: its name, "" for --service."""

    members: tuple[Member, ...]
    is_cluster: bool = False
    context: str = ""

    @property
    def only(self) -> Member:
        """Raises click.UsageError where there are several."""
        if len(self.members) > 1:
            names = " or ".join(member.name for member in self.members)
            raise click.UsageError(
                f"The context {self.context} has several services, and this is about one: name it, --service {names}."
            )
        return self.members[0]


def chosen_services(address: str | None) -> Services | None:
    """``address``: of --service, an address or the name of a service of the context. Without one, all of the context;
    None where there is no context either.

    Raises ConfigError of a name that is none in the context, and of a file of contexts that is wrong.
    """
    if address is not None:
        return Services((_named(address),))
    context = calling().context
    return None if context is None else Services(context.members, context.is_cluster, context.name)


def _named(address: str) -> Member:
    if not NAME_PATTERN.fullmatch(address):
        return Member(address, address)
    context = calling().context
    if context is None:
        return Member(address, address)  # which is refused where it is used, with how to write one
    found = context.member(address)
    if found is None:
        names = ", ".join(member.name for member in context.members)
        raise ConfigError(
            f"--service: the context {context.name} has no service {address!r}: {names}",
            next_step="Name one of them, or write an address: unix:///path or host:port.",
        )
    return found


def services_of(path: Path | None, address: str | None, pool_name: str = "") -> Services | None:
    """Of a command that also takes the PATH of a pool: None where that is meant.

    Raises click.UsageError unless one of them is, and what :func:`chosen_services` raises.
    """
    if path is not None and address is not None:
        raise click.UsageError("Name either the PATH of a pool or --service ADDRESS.")
    if path is not None and calling().context_name is not None:
        raise click.UsageError("PATH names a pool on this machine; --context is for services. Leave one out.")
    if path is not None:
        if pool_name:
            raise click.UsageError("--pool is for --service ADDRESS; PATH names a pool already.")
        return None
    services = chosen_services(address)
    if services is None:
        raise click.UsageError(
            "Name either the PATH of a pool or --service ADDRESS, or choose a context: mfctl context use NAME."
        )
    return services


def refuse_beside_context(what: str) -> None:
    """Raises click.UsageError when ``what``, which tells the service too, is given beside --context."""
    if calling().context_name is not None:
        raise click.UsageError(f"{what} and --context both tell which service is meant. Leave one out.")
