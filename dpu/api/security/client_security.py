"""The caller's side: whom it believes to be the service, and as whom it calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc

from meshfusion.dpu.api.address import TcpAddress, UnixAddress
from meshfusion.dpu.api.security.files import read_secret, read_small
from meshfusion.dpu.api.security.rotated import FRESH_S, Rotated
from meshfusion.dpu.api.security.token_text import parse_token
from meshfusion.jbof.errors import ConfigError, FieldValueError

log = logging.getLogger("meshfusion.security")


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Files, by name: nothing secret. ``ca``: of the service's certificate; None: no TLS. ``certificate``, ``key``:
    this caller's, both or none. ``server_name``: what the service's certificate names, where that is not the address's
    host. ``token_file``: holds the token to show. ``label``: what messages call one of these fields."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    token_file: Path | None = None
    label: Callable[[str], str] = field(default=str, compare=False, repr=False)

    def problem(self, address: TcpAddress | UnixAddress) -> FieldValueError | None:
        """What does not go together, or not with ``address``; its field is one of this class."""
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            return FieldValueError("is missing: a certificate and its key belong together", "name both", field=missing)
        if self.ca is None and (self.certificate is not None or self.server_name is not None):
            return FieldValueError("is missing: TLS needs the CA of the service's certificate", "name it", field="ca")
        if self.ca is not None and isinstance(address, UnixAddress):
            return FieldValueError("is for TLS, which unix sockets have no need of", "remove it", field="ca")
        if self.ca is None and isinstance(address, TcpAddress) and not address.is_loopback:
            problem = f"is missing: {address} is not on this machine, and without TLS anybody on the way could be it"
            return FieldValueError(problem, "name the CA of the service's certificate", field="ca")
        return None


@dataclass(frozen=True, slots=True)
class ClientMaterial:
    """What the files of TLS hold, checked; the key in no repr."""

    ca: bytes
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    warnings: tuple[str, ...] = ()


class ClientCredentials:
    """Reads the files of a :class:`ClientSecurity`, again when they change.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` when it is made of bad ones.
    """

    def __init__(self, security: ClientSecurity, *, utc: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._security = security
        self._utc = utc
        self._tls: Rotated[ClientMaterial] | None = None
        self._token: Rotated[str] | None = None
        s = security
        if s.ca is not None:
            paths = tuple(path for path in (s.ca, s.certificate, s.key) if path is not None)
            self._tls = Rotated(paths, self._read_tls, "TLS towards the chunk service")
            for text in self.warnings():
                log.warning("%s", text)
        if s.token_file is not None:
            self._token = Rotated((s.token_file,), self._read_token, "the token for the chunk service", fresh_s=FRESH_S)

    def version(self) -> int:
        """Another one when a new channel would be made of other files."""
        return 0 if self._tls is None else self._tls.current()[1]

    def warnings(self) -> tuple[str, ...]:
        """Of certificates that expire soon."""
        return () if self._tls is None else self._tls.current()[0].warnings

    def channel(self, target: str, options: list[tuple[str, object]]) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(target, options=options)
        found = self._tls.current()[0]
        credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.certificate)
        if self._security.server_name is not None:
            options = [*options, ("grpc.ssl_target_name_override", self._security.server_name)]
        return grpc.secure_channel(target, credentials, options=options)

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Sent with each call. Secret: never to be logged."""
        return None if self._token is None else (("authorization", f"Bearer {self._token.current()[0]}"),)

    def _read_tls(self) -> ClientMaterial:
        try:
            return read_client_tls(self._security, self._utc())
        except FieldValueError as error:
            raise self._error(error) from error

    def _read_token(self) -> str:
        try:
            return read_token(self._security)
        except FieldValueError as error:
            raise self._error(error) from None  # no cause: it might quote the token

    def _error(self, error: FieldValueError) -> ConfigError:
        label, value = self._security.label(error.field), getattr(self._security, error.field)
        return ConfigError(f"{label} = {value}: {error.problem}", next_step=f"{error.fix}.")


def read_client_tls(security: ClientSecurity, now: datetime) -> ClientMaterial:
    """With TLS only. Raises :class:`~meshfusion.jbof.errors.FieldValueError`, whose field is one of ``security``."""
    # Only where there is TLS: the library costs an engine's start-up a while.
    from meshfusion.dpu.api.security.certificates import Purpose, check_authorities, check_pair

    assert security.ca is not None, "asked without TLS"
    ca = read_small(security.ca, "ca")
    expiries = [check_authorities(ca, "ca", now)]
    certificate = key = None
    if security.certificate is not None and security.key is not None:
        certificate, key = read_small(security.certificate, "certificate"), read_secret(security.key, "key")
        expiries.append(check_pair(certificate, key, Purpose.CLIENT, now))
    warnings = tuple(text for expiry in expiries if (text := expiry.warning(now)))
    return ClientMaterial(
        ca.data, None if certificate is None else certificate.data, None if key is None else key.data, warnings
    )


def read_token(security: ClientSecurity) -> str:
    """With a token file only. Raises FieldValueError, without what the file holds."""
    assert security.token_file is not None, "asked without one"
    return parse_token(read_secret(security.token_file, "token_file").data)


def check_client_files(security: ClientSecurity, now: datetime) -> tuple[tuple[str, ...], tuple[FieldValueError, ...]]:
    """What is to be known of the files, and what is wrong with them, before anything is called."""
    notes: tuple[str, ...] = ()
    problems = []
    try:
        notes = () if security.ca is None else read_client_tls(security, now).warnings
    except FieldValueError as error:
        problems.append(error)
    try:
        if security.token_file is not None:
            read_token(security)
    except FieldValueError as error:
        problems.append(error)
    return notes, tuple(problems)
