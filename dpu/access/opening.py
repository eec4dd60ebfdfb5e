"""From the configuration to what guards the service."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from meshfusion.dpu.access.audit_log import FILE_NAME, AuditLog
from meshfusion.dpu.access.tokens_file import TokensFile
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.identity import CallerIdentity
from meshfusion.dpu.api.security.rotated import Tell, tell_nobody
from meshfusion.dpu.api.security.server_tls import ServerTls
from meshfusion.dpu.config import ServiceConfig


class Door(NamedTuple):
    """What :func:`~meshfusion.dpu.api.server.serve` is to be given."""

    guard: Guard
    tls: ServerTls | None
    audit: AuditLog


def open_door(config: ServiceConfig, tell: Tell = tell_nobody) -> Door:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` of bad files. That the audit log cannot be written is logged
    only: lookups are not kept waiting for it. ``tell`` is told of files that turn out bad later, and of certificates
    that are near their end."""
    tls = None if config.tls is None else ServerTls(config.tls.files, tell=tell)
    subjects = {entry.subject: entry.principal() for entry in config.access or ()}
    tokens = None if config.tokens_file is None else TokensFile(config.tokens_file, tell=tell)
    audit = AuditLog(audit_path(config))
    audit.probe()
    return Door(Guard(CallerIdentity(subjects, tokens.find if tokens else None), audit), tls, audit)


def audit_path(config: ServiceConfig) -> Path:
    if config.audit is not None and config.audit.path is not None:
        return config.audit.path
    assert config.pool is not None, "with pools the file is named, which is checked with the configuration"
    return config.pool.path / FILE_NAME
