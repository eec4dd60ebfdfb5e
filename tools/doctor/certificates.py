"""Certificates, keys and tokens of the service and its callers: valid, private, belonging together."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from meshfusion.jbof.errors import FieldValueError, MeshFusionError
from meshfusion.tools.mfctl.context_types import ServiceContext
from meshfusion.tools.mfctl.findings import Finding, State

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServiceConfig


def check_service_files(config: ServiceConfig, now: datetime) -> Iterator[Finding]:
    """Of a service's configuration: ``tls`` and ``tokens_file``."""
    if config.tls is not None:
        yield _server_tls(config, now)
    if config.tokens_file is not None:
        from meshfusion.dpu.access.tokens_file import read_tokens

        try:
            count = len(read_tokens(config.tokens_file))
        except MeshFusionError as error:
            yield Finding("tokens_file", State.FAIL, error.message, error.next_step)
        else:
            yield Finding("tokens_file", State.OK, f"{config.tokens_file}: {count} tokens")


def _server_tls(config: ServiceConfig, now: datetime) -> Finding:
    from meshfusion.dpu.api.security.server_tls import ServerTlsFiles, read_server_tls

    assert config.tls is not None
    files = ServerTlsFiles(config.tls.certificate, config.tls.key, config.tls.client_ca)
    try:
        material = read_server_tls(files, now)
    except FieldValueError as error:
        path = getattr(files, error.field)
        return Finding("tls", State.FAIL, f"tls.{error.field} = {path}: {error.problem}", f"{error.fix}.")
    warnings = material.warnings(now)
    if warnings:
        return Finding(
            "tls", State.WARN, "\n".join(warnings), "Put the new files in their places: no restart is needed."
        )
    until = min(expiry.not_after for expiry in material.expiries)
    return Finding("tls", State.OK, f"{files.certificate} and what belongs to it is valid until {until:%Y-%m-%d}")


def check_context_files(context: ServiceContext, now: datetime) -> Iterator[Finding]:
    """Of a context of this user: what is shown to its services."""
    from meshfusion.dpu.api.security.client_security import ClientSecurity, check_client_files

    for member in context.members:
        access = member.access
        if access.ca is None and access.token_file is None:
            continue
        check = f"context {context.name}" + (f" {member.name}" if context.is_cluster else "")
        notes, problems = check_client_files(ClientSecurity(**access.given()), now)
        for problem in problems:
            cause = f"{problem.field} = {getattr(access, problem.field)}: {problem.problem}"
            yield Finding(check, State.FAIL, cause, f"{problem.fix}.")
        for note in notes:
            yield Finding(check, State.WARN, note, "Ask for the next one now; it is used as soon as it is there.")
        if not (problems or notes):
            yield Finding(check, State.OK, "its files are valid and private")
