"""Binds a gRPC server to an address without ever displacing a server that lives."""

from __future__ import annotations

import os
import socket
import stat

import grpc

from meshfusion.dpu.api.address import TcpAddress, UnixAddress
from meshfusion.jbof.errors import ConfigError

_PROBE_TIMEOUT_S = 1.0
NOT_SECURED = "other machines are served over TLS only, and only when they say who they are"
SECURE_IT = (
    "set tls with client_ca and access, or tls and tokens_file (docs/security.md); or listen on unix:///path or "
    "127.0.0.1:PORT"
)


def check_free(address: UnixAddress | TcpAddress) -> None:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` when :func:`bind` would find ``address`` taken or not
    usable. Changes nothing, so another process may still come first."""
    if isinstance(address, UnixAddress):
        _find_stale_socket(address)
    elif address.port and address.is_loopback:  # port 0 is any free one; elsewhere, bind itself refuses
        _check_port(address)


def bind(
    server: grpc.Server,
    address: UnixAddress | TcpAddress,
    credentials: grpc.ServerCredentials | None = None,
    *,
    asks_who_calls: bool = False,
) -> UnixAddress | TcpAddress:
    """Bind ``server`` to ``address``; the result carries the real port when port 0 was asked. ``credentials``: of TLS.
    Without them, or when nobody is asked who calls, only addresses of this machine are allowed.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` when the address is taken, not allowed or not usable.
    """
    if isinstance(address, UnixAddress):
        assert credentials is None, "the configuration has no TLS on a unix socket"
        _bind_unix(server, address)
        return address
    if not address.is_loopback and (credentials is None or not asks_who_calls):
        raise ConfigError(
            f"listen: {address} is not a loopback address, and {NOT_SECURED}",
            next_step=f"{SECURE_IT[0].upper()}{SECURE_IT[1:]}.",
        )
    cause: Exception | None = None
    try:
        if credentials is None:
            port = server.add_insecure_port(address.grpc_target)
        else:
            port = server.add_secure_port(address.grpc_target, credentials)
    except RuntimeError as e:
        port, cause = 0, e
    if port == 0:
        raise _cannot_listen(address) from cause
    return TcpAddress(address.host, port)


def _bind_unix(server: grpc.Server, address: UnixAddress) -> None:
    _clear_stale_socket(address)
    # The socket must never be open to others, not even between bind and chmod: whoever can connect can read
    # where every chunk lies and drop it. The mask is the process's, so this belongs to start-up.
    old_mask = os.umask(0o177)
    try:
        bound = server.add_insecure_port(address.grpc_target)
    except RuntimeError as e:
        raise _cannot_bind(address) from e
    finally:
        os.umask(old_mask)
    if bound == 0:
        raise _cannot_bind(address)
    os.chmod(address.path, 0o600)


def _cannot_bind(address: UnixAddress) -> ConfigError:
    return ConfigError(
        f"listen: cannot create the socket {address.path}",
        next_step=f"Check that you may write to {address.path.parent}, or choose another path.",
    )


def _cannot_listen(address: TcpAddress) -> ConfigError:
    return ConfigError(
        f"listen: cannot listen on {address}: the port is taken or not allowed",
        next_step="Stop the other process (`ss -ltnp` names it) or choose another port.",
    )


def _check_port(address: TcpAddress) -> None:
    """As gRPC does it: one of the addresses that the host name stands for is enough."""
    cause: OSError | None = None
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise _cannot_listen(address) from e
    for family, kind, protocol, _, at in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(at)
                probe.listen(1)
            return
        except OSError as e:
            cause = e
    raise _cannot_listen(address) from cause


def _clear_stale_socket(address: UnixAddress) -> None:
    """Remove the socket of a server that died. gRPC itself would also remove that of a living one."""
    if _find_stale_socket(address):
        address.path.unlink(missing_ok=True)


def _find_stale_socket(address: UnixAddress) -> bool:
    """Is the socket of a server that died in the way? Raises when anything else is, or no directory for it."""
    path = address.path
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(
                f"listen: the directory {path.parent} of the socket does not exist",
                next_step=f"Create it: mkdir -p {path.parent}",
            ) from None
        return False
    except OSError as e:
        raise _cannot_bind(address) from e
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"listen: {path} exists and is not a socket",
            next_step="Choose another path, or remove the file if it is not needed.",
        )
    if _answers(path):
        raise ConfigError(
            f"listen: another process already serves on {path}",
            next_step="Use that service, stop it, or choose another socket path.",
        )
    return True


def _answers(path: os.PathLike[str]) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # Full backlog, no permission: somebody may be there, so leave it alone.
            return True
    return True
