"""Addresses of the chunk service: ``unix:///path/to/socket`` or ``host:port``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from meshfusion.jbof.errors import ConfigError

# sun_path holds 108 bytes with its final NUL.
MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path

    @property
    def grpc_target(self) -> str:
        return f"unix:{self.path}"

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    @property
    def grpc_target(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return self.grpc_target


def is_same_place(one: UnixAddress | TcpAddress, other: UnixAddress | TcpAddress) -> bool:
    """Can only one of two servers of this machine listen there? So it is where one listens on all of its addresses and
    the other on one of them. Port 0 is any that is free. Names other than localhost are not looked up."""
    if not isinstance(one, TcpAddress) or not isinstance(other, TcpAddress):
        return one == other
    return one.port == other.port != 0 and (_takes_in(one.host, other.host) or _takes_in(other.host, one.host))


def _takes_in(host: str, other: str) -> bool:
    if host == other:
        return True
    if host == "localhost":
        return TcpAddress(other, 0).is_loopback
    # gRPC takes both families for either.
    return host in ("::", "0.0.0.0")


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Parse an address as it stands in a configuration or on a command line.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` that says what is wrong with it.
    """
    if text.startswith("unix:"):
        return _parse_unix(text)
    host, colon, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port_text.isascii() or not port_text.isdigit() or "/" in text:
        raise ConfigError(
            f"{text!r} is not an address of a chunk service",
            next_step="Write unix:///absolute/path/to/socket or 127.0.0.1:PORT.",
        )
    port = int(port_text)
    if port > 65_535:
        raise ConfigError(f"{text!r} names port {port}", next_step="Use a port between 1 and 65535.")
    return TcpAddress(host, port)


def _parse_unix(text: str) -> UnixAddress:
    path = text.removeprefix("unix://")
    if not path.startswith("/") or path.endswith("/"):
        raise ConfigError(
            f"{text!r} does not name an absolute socket path",
            next_step="Write three slashes and the path of the socket: unix:///run/meshfusion/meshfusion.sock",
        )
    size = len(path.encode())
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path!r} has {size} bytes; the kernel allows {MAX_SOCKET_PATH_BYTES}",
            next_step="Choose a shorter path, for example below /run.",
        )
    return UnixAddress(Path(path))
