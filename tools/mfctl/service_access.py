"""How ``mfctl`` calls a service: options of ``mfctl`` itself, before the command, variables of the environment, and the
context."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from meshfusion.tools.mfctl.completing import context_names
from meshfusion.tools.mfctl.context_file import VARIABLE, contexts_path, read_contexts

if TYPE_CHECKING:
    from meshfusion.dpu.api.security.client_security import ClientSecurity
    from meshfusion.tools.mfctl.context_types import Contexts, Member, ServiceContext

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_FILE: Final = click.Path(path_type=Path, readable=False)  # whether it can be read is told with a next step
_OPTIONS: Final = (
    ("ca", _FILE, "PATH", "CA of the service's certificate, for a service over TLS."),
    ("certificate", _FILE, "PATH", "Certificate to show to the service."),
    ("key", _FILE, "PATH", "Its key; nobody but its owner may read it, or the group root."),
    ("server_name", str, "NAME", "What the service's certificate names, where that is not the address's host."),
    ("token_file", _FILE, "PATH", "File with the token to show to the service."),
)


class Calling:
    """``given``: of the options and variables, by the fields of ClientSecurity. ``context_name``: of --context.
    ``has_contexts``: else there are none, whatever file the user has."""

    def __init__(self, given: Mapping[str, Any], context_name: str | None, *, has_contexts: bool = True) -> None:
        self.given = given
        self.context_name = context_name
        self._has_contexts = has_contexts

    @cached_property
    def contexts(self) -> Contexts:
        """Raises ConfigError of a file that is wrong."""
        return read_contexts(contexts_path(os.environ))

    @cached_property
    def context(self) -> ServiceContext | None:
        """The one that is named, or the current one. Raises ConfigError when there is none of that name."""
        from meshfusion.jbof.errors import ConfigError

        if not self._has_contexts or (self.context_name is None and not _may_have_contexts()):
            return None
        name = self.context_name or self.contexts.current
        if not name:
            return None
        found = self.contexts.by_name.get(name)
        if found is None:
            known = ", ".join(self.contexts.by_name) or "none yet"
            raise ConfigError(
                f"--context: there is no context {name!r} in {contexts_path(os.environ)}: {known}",
                next_step="Name one of them, or make it: mfctl context set.",
            )
        return found


def _may_have_contexts() -> bool:
    """Without a home nothing is current, and that is no error until a context is asked for."""
    return any(os.environ.get(name, "").startswith("/") for name in (VARIABLE, "XDG_CONFIG_HOME", "HOME"))


def access_options(command: F) -> F:
    """For the outermost command, which gets ``**access`` of :func:`remember_access`."""
    for name, kind, metavar, text in reversed(_OPTIONS):
        variable = f"MESHFUSION_SERVICE_{name.upper()}"
        command = click.option(
            _option(name), f"service_{name}", type=kind, metavar=metavar, envvar=variable,
            help=f"{text} Also from the variable {variable}.",
        )(command)  # fmt: skip
    return click.option(
        "--context", "context_name", metavar="NAME", shell_complete=context_names,
        help="Of the services of this context, instead of the current one (mfctl context list).",
    )(command)  # fmt: skip


def remember_access(context: click.Context, access: dict[str, Any]) -> None:
    given = {name: access[f"service_{name}"] for name, *_ in _OPTIONS if access[f"service_{name}"]}
    context.obj = Calling(given, access["context_name"])


def calling() -> Calling:
    """Of the command that runs; one without anything where none does."""
    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context is not None else None
    return found if isinstance(found, Calling) else Calling({}, None, has_contexts=False)


def given_access_to(address: str) -> ClientSecurity:
    """As :func:`access_to`, from options and variables alone: for what is no call from here."""
    return _security(address, calling().given, None)


def access_to(address: str) -> ClientSecurity:
    """For a client of the service at ``address``. A unix socket has no TLS, whatever the environment says.

    What a context names is shown to no other address than its own: a token goes to whom it is for. Options and
    variables come before it.
    """
    from meshfusion.dpu.api.address import parse_address

    now = calling()
    context = now.context
    at = str(parse_address(address))
    member = next((one for one in context.members if one.address == at), None) if context is not None else None
    return _security(address, now.given, member)


def _security(address: str, given: Mapping[str, Any], member: Member | None) -> ClientSecurity:
    from meshfusion.dpu.api.address import UnixAddress, parse_address
    from meshfusion.dpu.api.security.client_security import ClientSecurity

    if isinstance(parse_address(address), UnixAddress):
        given = {name: value for name, value in given.items() if name == "token_file"}
    if member is None:
        return ClientSecurity(**given, label=_option)

    def label(name: str) -> str:
        return _option(name) if name in given else f"context: {name} of {member.name}"

    return ClientSecurity(**{**member.access.given(), **given}, label=label)


def with_access(call: Callable[[], T]) -> Callable[[], T]:
    """``call`` for another thread, where :func:`access_to` answers as in this one: click's contexts are a thread's."""
    context = click.get_current_context(silent=True)
    if context is None:
        return call
    root = context.find_root()

    def called() -> T:
        with click.Context(root.command, obj=root.obj).scope():
            return call()

    return called


def _option(name: str) -> str:
    return f"--service-{name.replace('_', '-')}"
