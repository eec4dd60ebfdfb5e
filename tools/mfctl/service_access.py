"""How ``mfctl`` calls a service: options of ``mfctl`` itself, before the command, or variables of the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from meshfusion.dpu.api.security.client_security import ClientSecurity

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


def access_options(command: F) -> F:
    """For the outermost command, which gets ``**access`` of :func:`remember_access`."""
    for name, kind, metavar, text in reversed(_OPTIONS):
        variable = f"MESHFUSION_SERVICE_{name.upper()}"
        command = click.option(
            _option(name), f"service_{name}", type=kind, metavar=metavar, envvar=variable,
            help=f"{text} Also from the variable {variable}.",
        )(command)  # fmt: skip
    return command


def remember_access(context: click.Context, access: dict[str, Any]) -> None:
    context.obj = {name: access[f"service_{name}"] or None for name, *_ in _OPTIONS}


def access_to(address: str) -> ClientSecurity:
    """For a client of the service at ``address``. A unix socket has no TLS, whatever the environment says."""
    from meshfusion.dpu.api.address import UnixAddress, parse_address
    from meshfusion.dpu.api.security.client_security import ClientSecurity

    context = click.get_current_context(silent=True)
    given: dict[str, Any] = (context.find_root().obj if context is not None else None) or {}
    if isinstance(parse_address(address), UnixAddress):
        given = {name: value for name, value in given.items() if name == "token_file"}
    return ClientSecurity(**given, label=_option)


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
