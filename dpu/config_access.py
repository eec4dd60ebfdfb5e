"""The part of the service's configuration that says who may call it, and where that is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeGuard

from pydantic import AfterValidator, Field

from meshfusion.dpu.access.tokens_file import Name, RoleName, read_tokens
from meshfusion.dpu.api.address import TcpAddress, UnixAddress, parse_address
from meshfusion.dpu.api.listen import NOT_SECURED, SECURE_IT
from meshfusion.dpu.api.security.principal import Principal, PrincipalKind
from meshfusion.dpu.api.security.roles import Role
from meshfusion.dpu.api.security.server_tls import ServerMaterial, ServerTlsFiles, read_server_tls
from meshfusion.dpu.config_types import AbsolutePath, ConfigModel
from meshfusion.jbof.config_problems import as_fix
from meshfusion.jbof.errors import ConfigError, FieldValueError


class TlsConfig(ConfigModel):
    """With what the service proves itself, and whom it lets in. New files are used from the next connection on."""

    certificate: AbsolutePath = Field(
        description="PEM file of the service's certificate, and after it those that lead to its CA.",
        examples=["/etc/meshfusion/tls/service.pem"],
    )
    key: AbsolutePath = Field(
        description="PEM file of its key; nobody but its owner may read it, or the group root.",
        examples=["/etc/meshfusion/tls/service.key"],
    )
    client_ca: AbsolutePath | None = Field(
        default=None,
        description="PEM file of the CA of callers' certificates: who has none is kept out. Without it, callers need a "
        "token.",
        examples=["/etc/meshfusion/tls/client-ca.pem"],
    )

    @property
    def files(self) -> ServerTlsFiles:
        return ServerTlsFiles(self.certificate, self.key, self.client_ca)


class AccessEntry(ConfigModel):
    """Who a certificate stands for."""

    subject: Name = Field(description="Its common name, or one of its alternative names.")
    role: RoleName = Field(description="engine, operator or read-only.")
    tenant: Name = Field(default="default", description="For whom it may attach.")

    def principal(self) -> Principal:
        return Principal(PrincipalKind.CERTIFICATE, self.subject, frozenset({Role(self.role)}), self.tenant)


def _once(entries: list[AccessEntry]) -> list[AccessEntry]:
    subjects = [entry.subject for entry in entries]
    for subject in subjects:
        if subjects.count(subject) > 1:
            raise FieldValueError(f"names the subject {subject!r} twice", "keep one of the entries")
    return entries


AccessList = Annotated[list[AccessEntry], Field(min_length=1, max_length=10_000), AfterValidator(_once)]


class AuditConfig(ConfigModel):
    """The record of calls of administration."""

    path: AbsolutePath | None = Field(
        default=None,
        description="File of JSON lines, mode 0600; without it audit.log in the pool's directory; with pools it must "
        "be named. Calls of administration that cannot be recorded are refused.",
        examples=["/var/log/meshfusion/audit.log"],
    )


class AccessProblem(NamedTuple):
    """``field``: in the whole configuration."""

    field: tuple[str, ...]
    value: object
    problem: str
    fix: str


def access_problems(data: dict[Any, Any]) -> Iterator[AccessProblem]:
    """What does not go together, and what is wrong with the files that are named. ``data`` is what the file holds, not
    yet checked: to be told along with all the rest, and silent about what the model tells."""
    addresses, tls = addresses_of(data.get("listen")), data.get("tls")
    access, tokens_file = data.get("access"), data.get("tokens_file")
    client_ca = tls.get("client_ca") if isinstance(tls, dict) else None
    is_known_by = access is not None or tokens_file is not None
    for text, address in addresses.items():
        if isinstance(address, TcpAddress) and not address.is_loopback and (tls is None or not is_known_by):
            problem = f"is not a loopback address, and {NOT_SECURED}"
            yield AccessProblem(("listen",), text, problem, SECURE_IT)
    if addresses and tls is not None and all(isinstance(address, UnixAddress) for address in addresses.values()):
        problem = "is not for a unix socket, which is this machine's alone and guarded by its mode"
        yield AccessProblem(("tls",), None, problem, "remove it, or listen on host:port, too")
    if access is not None and client_ca is None:
        problem = "names certificates, and without tls.client_ca callers show none"
        yield AccessProblem(("access",), None, problem, "set tls.client_ca, or use tokens_file")
    if client_ca is not None and not is_known_by:
        problem = "is asked of callers, and nobody is known by a certificate"
        yield AccessProblem(("tls", "client_ca"), client_ca, problem, "add access: [{subject: engine-1, role: engine}]")
    if isinstance(tls, dict):
        yield from _tls_problems(tls)
    if _is_path(tokens_file):
        try:
            read_tokens(Path(tokens_file))
        except ConfigError as error:
            # The message names the key, which is told anyway.
            cause = error.__cause__
            problem = cause.problem if isinstance(cause, FieldValueError) else error.message
            yield AccessProblem(("tokens_file",), tokens_file, problem, as_fix(error.next_step))


def expiry_notes(tls: TlsConfig | None) -> tuple[str, ...]:
    """Which certificates expire soon."""
    material = None if tls is None else _material(tls.files)
    return () if material is None else material.warnings(datetime.now(UTC))


def _material(files: ServerTlsFiles) -> ServerMaterial | None:
    try:
        return read_server_tls(files, datetime.now(UTC))
    except FieldValueError:
        return None  # told as a problem


def _tls_problems(tls: dict[Any, Any]) -> Iterator[AccessProblem]:
    named = {name: tls.get(name) for name in ("certificate", "key", "client_ca")}
    if not all(_is_path(value) or (name == "client_ca" and value is None) for name, value in named.items()):
        return
    try:
        read_server_tls(ServerTlsFiles(**{n: Path(v) if v is not None else None for n, v in named.items()}),  # type: ignore[arg-type]
                        datetime.now(UTC))  # fmt: skip
    except FieldValueError as error:
        yield AccessProblem(("tls", error.field), named[error.field], error.problem, error.fix)


def addresses_of(listen: object) -> dict[str, TcpAddress | UnixAddress]:
    """Of what stands there, one or several; without those that the model rejects."""
    found: dict[str, TcpAddress | UnixAddress] = {}
    for text in listen if isinstance(listen, list) else [listen]:
        with contextlib.suppress(ConfigError):
            found |= {text: parse_address(text)} if isinstance(text, str) else {}
    return found


def _is_path(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value
