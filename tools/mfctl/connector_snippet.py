"""What an engine's ``--kv-transfer-config`` says of a service: from the service's configuration, or its address."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.access.tokens_file import read_tokens
from meshfusion.dpu.api.address import TcpAddress, UnixAddress, parse_address
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.security.roles import Role
from meshfusion.dpu.api.tenant import DEFAULT_TENANT, check_name
from meshfusion.dpu.config import ServedPool, ServiceConfig
from meshfusion.dpu.config_exports import parse_portal
from meshfusion.host.connector.config import EXTRA_CONFIG, parse_connector_config
from meshfusion.jbof.errors import ConfigError, FieldValueError
from meshfusion.tools.mfctl.connector_config import CLASS_NAME, MODULE_PATH

Security = Callable[[str], ClientSecurity]
"""Of a client of the service at an address, as `mfctl`'s own options have it."""

_RDMA: Final = "rdma"
_EVERY_ADDRESS: Final = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Snippet:
    """``transfer``: the kv_transfer_config. ``notes``: what else the engine's host needs, or what nobody can know."""

    transfer: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        return json.dumps(self.transfer, indent=2)

    @property
    def command(self) -> str:
        """A line of the shell; MODEL is to be replaced."""
        return f"vllm serve MODEL --kv-transfer-config {shlex.quote(json.dumps(self.transfer))}"


def snippet_of_address(address: str, tenant: str | None, security: Security) -> Snippet:
    """Of a service of which no more is known. Raises :class:`~meshfusion.jbof.errors.ConfigError`."""
    notes = [*_place_notes(parse_address(address)), "whether the service knows the tenant, and whether it exports its "
             "pool for path rdma, is not known from its address: --config FILE tells"]  # fmt: skip
    return _snippet(address, _checked(tenant or DEFAULT_TENANT), None, security(address), tuple(notes))


def snippet_of_config(config: ServiceConfig, address: str | None, tenant: str | None, security: Security) -> Snippet:
    """``address``: at which engines reach the service; None: that on which it listens.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` where no engine could attach with what is known.
    """
    reached = address or _listened(config)
    served = _pool_of(config, tenant)
    named = tenant or DEFAULT_TENANT
    called = security(reached)
    parsed = parse_address(reached)
    if isinstance(parsed, TcpAddress) or len(config.listen) == 1:  # at a socket beside others nobody is asked
        _check_shown(config, called)
    transports = {parse_portal(portal).transport for portal in served.exports.portals} if served.exports else set()
    notes = [*_place_notes(parsed), *_engine_notes(config, named)]
    if isinstance(parsed, TcpAddress) and not parsed.is_loopback and not transports:
        notes.append(
            "the service exports nothing: an engine on another machine attaches and finds no data. Add exports"
        )
    return _snippet(reached, named, _RDMA if _RDMA in transports else None, called, tuple(notes))


def _snippet(address: str, tenant: str, path: str | None, security: ClientSecurity, notes: tuple[str, ...]) -> Snippet:
    problem = security.problem(parse_address(address))
    if problem is not None:
        raise ConfigError(
            f"{security.label(problem.field)} {problem.problem}",
            next_step=f"{_sentence(problem.fix)} before the command: mfctl {security.label(problem.field)} FILE "
            "connector config",
        )
    extra: dict[str, Any] = {"service": address}
    tls = {name: getattr(security, name) for name in ("ca", "certificate", "key", "server_name")}
    given = {name: _value(value) for name, value in tls.items() if value is not None}
    if given:
        extra["service_tls"] = given
    if security.token_file is not None:
        extra["service_token_file"] = _value(security.token_file)
    if tenant != DEFAULT_TENANT:
        extra["tenant"] = tenant
    if path is not None:
        extra["path"] = path
    parse_connector_config(extra)  # as the engine does at its start
    transfer = {
        "kv_connector": CLASS_NAME,
        "kv_connector_module_path": MODULE_PATH,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        EXTRA_CONFIG: extra,
    }
    return Snippet(transfer, notes)


def _value(value: str | Path) -> str:
    """Paths are the engine's, which has another working directory."""
    return str(value.absolute()) if isinstance(value, Path) else value


def _listened(config: ServiceConfig) -> str:
    """Where engines connect to; of several addresses one of the network, which those of this machine reach, too."""
    addresses = dict(zip(map(parse_address, config.listen), config.listen, strict=True))
    usable = {
        address: text
        for address, text in addresses.items()
        if not (isinstance(address, TcpAddress) and (address.host in _EVERY_ADDRESS or address.port == 0))
    }
    if not usable:
        raise ConfigError(
            f"listen = {', '.join(config.listen)} is no address that engines could connect to",
            next_step="Add --service HOST:PORT, at which engines reach this service.",
        )
    return usable[next((one for one in usable if isinstance(one, TcpAddress)), next(iter(usable)))]


def _pool_of(config: ServiceConfig, tenant: str | None) -> ServedPool:
    named = _checked(tenant or DEFAULT_TENANT)
    found = next((served for served in config.served if named in served.tenants), None)
    if found is None:
        known = sorted(name for served in config.served for name in served.tenants)
        told = f"tenant {named} has no pool in it" if tenant else "it has pools for several tenants, and none is named"
        raise ConfigError(
            f"the service's configuration: {told}", next_step=f"Give --tenant, one of {', '.join(known)}."
        )
    return found


def _checked(tenant: str) -> str:
    try:
        return check_name(tenant)
    except FieldValueError as error:
        raise ConfigError(f"--tenant: {tenant!r} {error.problem}", next_step=f"{_sentence(error.fix)}.") from error


def _check_shown(config: ServiceConfig, security: ClientSecurity) -> None:
    """Does the engine show what the service asks for?"""
    label = security.label
    if config.tls is not None and security.ca is None:
        raise ConfigError(
            f"the service speaks TLS, and {label('ca')} is not given",
            next_step=f"Name the CA of its certificate before the command: mfctl {label('ca')} FILE connector config",
        )
    if config.tls is None and security.ca is not None:
        raise ConfigError(
            f"{label('ca')} is given, and the service speaks no TLS",
            next_step="Leave it out, or add tls to the service's configuration.",
        )
    if config.tls is not None and config.tls.client_ca is not None and security.certificate is None:
        raise ConfigError(
            f"the service asks callers for a certificate, and {label('certificate')} is not given",
            next_step=f"Name the engine's certificate and its key, before the command: {label('certificate')} FILE "
            f"{label('key')} FILE.",
        )
    asks = config.access is not None or config.tokens_file is not None
    if asks and security.certificate is None and security.token_file is None:
        raise ConfigError(
            f"the service asks who calls, and {label('token_file')} is not given",
            next_step="Make a token (mfctl token create NAME --role engine), and name its file, before the command: "
            f"{label('token_file')} FILE.",
        )


def _engine_notes(config: ServiceConfig, tenant: str) -> tuple[str, ...]:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` where the service lets in no engine of this tenant."""
    wanted = (Role.ENGINE.value, tenant)
    if config.access is None and config.tokens_file is None:
        return ()
    if any((entry.role, entry.tenant) == wanted for entry in config.access or ()):
        return ()
    if config.tokens_file is not None:
        try:
            entries = read_tokens(config.tokens_file)
        except ConfigError:  # another machine's, or another user's; the service tells what is wrong with it
            return (f"{config.tokens_file} cannot be read here: whether it has a token of an engine is not known",)
        if any((entry.role, entry.tenant) == wanted for entry in entries):
            return ()
    raise ConfigError(
        f"the service's configuration lets in no caller with the role engine and the tenant {tenant}",
        next_step="Add one to access, or its token's entry to tokens_file.",
    )


def _place_notes(address: TcpAddress | UnixAddress) -> tuple[str, ...]:
    if isinstance(address, UnixAddress):
        return ("a unix socket is the service's machine's and user's: run the engine there, as that user",)
    return ("the address is this machine's own: run the engine there",) if address.is_loopback else ()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
