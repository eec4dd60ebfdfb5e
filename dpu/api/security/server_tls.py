"""The service's side of TLS: its certificate, and whose certificates it asks callers for; both may be exchanged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, cast

import grpc

from meshfusion.dpu.api.security.certificates import Expiry, Purpose, check_authorities, check_pair
from meshfusion.dpu.api.security.files import read_secret, read_small
from meshfusion.dpu.api.security.rotated import Rotated, Tell, tell_nobody
from meshfusion.jbof.errors import ConfigError, FieldValueError

log = logging.getLogger("meshfusion.security")

_WARN_EVERY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ServerTlsFiles:
    """``client_ca`` None: callers show no certificate, and need a token."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, *(() if self.client_ca is None else (self.client_ca,)))


@dataclass(frozen=True, slots=True)
class ServerMaterial:
    """What the files hold, checked. Of ``key``, which is secret, there is no repr."""

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    expiries: tuple[Expiry, ...]

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.client_ca)

    def warnings(self, now: datetime) -> tuple[str, ...]:
        return tuple(text for expiry in self.expiries if (text := expiry.warning(now)))


def read_server_tls(files: ServerTlsFiles, now: datetime) -> ServerMaterial:
    """Raises :class:`~meshfusion.jbof.errors.FieldValueError`: its field is one of certificate, key, client_ca."""
    certificate = read_small(files.certificate, "certificate")
    key = read_secret(files.key, "key")
    expiries = [check_pair(certificate, key, Purpose.SERVER, now)]
    client_ca = None
    if files.client_ca is not None:
        authorities = read_small(files.client_ca, "client_ca")
        expiries.append(check_authorities(authorities, "client_ca", now))
        client_ca = authorities.data
    return ServerMaterial(certificate.data, key.data, client_ca, tuple(expiries))


class ServerTls:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` when it is made of bad files. Later ones that are bad are
    logged and not used; connections go on with what they were made with. ``tell`` is told of them, and of certificates
    that are near their end."""

    def __init__(
        self,
        files: ServerTlsFiles,
        *,
        tell: Tell = tell_nobody,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.asks_for_certificates = files.client_ca is not None
        self._utc = utc
        self._tell = tell
        self._material = Rotated(files.paths, lambda: self._read(files), "tls", tell=tell)
        self._lock = threading.Lock()
        self._served_version = 1
        self._warned_at: datetime | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Follow the files; asked at every new connection."""
        material, self._served_version = self._material.current()
        self._warn(material)
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._fetch)  # the stubs know of no None
        return grpc.dynamic_ssl_server_credentials(
            material.configuration(), fetch, require_client_authentication=self.asks_for_certificates
        )

    def _read(self, files: ServerTlsFiles) -> ServerMaterial:
        try:
            return read_server_tls(files, self._utc())
        except FieldValueError as error:
            path = getattr(files, error.field)
            raise ConfigError(f"tls.{error.field} = {path}: {error.problem}", next_step=f"{error.fix}.") from error

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, on its threads. Whatever is wrong must not keep callers out."""
        try:
            material, version = self._material.current()
            self._warn(material)
            with self._lock:
                is_new, self._served_version = version != self._served_version, version
            return material.configuration() if is_new else None
        except Exception:
            log.exception("tls: looking for new certificates failed; the former ones are used on")
            return None

    def _warn(self, material: ServerMaterial) -> None:
        now = self._utc()
        with self._lock:
            if self._warned_at is not None and now - self._warned_at < _WARN_EVERY:
                return
            warnings = material.warnings(now)
            self._warned_at = now if warnings else None
        for text in warnings:
            log.warning("%s", text)
            self._tell(text)
