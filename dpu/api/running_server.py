"""gRPC servers of one service: made, bound to addresses, and stopped together."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from meshfusion.dpu.api.address import UnixAddress
from meshfusion.dpu.api.doors import Address, nearest
from meshfusion.dpu.api.limits import MAX_MESSAGE_BYTES
from meshfusion.dpu.api.listen import bind
from meshfusion.dpu.api.refusing import RefusesUnread
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.server_tls import ServerTls

MAX_DEADLINE_S = 60.0  # the most that any call gets (rule 8)

log = logging.getLogger("meshfusion.dpu.api.server")


class RunningServer:
    """What answers until :meth:`stop`. ``addresses``: what clients connect to, in the order that was asked for;
    ``address``: that which is best on this machine."""

    def __init__(
        self, servers: Sequence[grpc.Server], executors: Sequence[ThreadPoolExecutor], addresses: Sequence[Address]
    ) -> None:
        self._servers = servers
        self._executors = executors
        self.addresses = tuple(map(str, addresses))
        self.address = str(nearest(addresses))

    def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, let running ones finish for at most ``grace_s`` seconds, then cut them off."""
        ends = [server.stop(grace_s) for server in self._servers]
        end_s = time.monotonic() + grace_s + 1.0
        for end in ends:
            end.wait(max(0.0, end_s - time.monotonic()))
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)


def make_server(
    executor: ThreadPoolExecutor, guard: Guard, max_concurrent_calls: int, *, connection_age_s: float | None
) -> grpc.Server:
    """Without handlers and addresses yet. ``connection_age_s``: connections are made anew after that; None: never."""
    return grpc.server(
        executor,
        interceptors=[RefusesUnread(guard)],
        maximum_concurrent_rpcs=max_concurrent_calls,
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Otherwise a second server on the same port would silently take half of the calls.
            ("grpc.so_reuseport", 0),
            *(() if connection_age_s is None else _ageing(connection_age_s)),
        ],
    )


def bind_server(server: grpc.Server, address: Address, tls: ServerTls | None, guard: Guard) -> Address:
    """Where it listens then. Raises as :func:`~meshfusion.dpu.api.listen.bind`."""
    if isinstance(address, UnixAddress):
        bind(server, address)
        log.info("serving on %s, mode 0600", address)
        return address
    credentials = None if tls is None else tls.credentials()
    bound = bind(server, address, credentials, asks_who_calls=guard.asks_who_calls)
    log.info("serving on %s%s", bound, "" if tls is None else ", TLS")
    return bound


def _ageing(age_s: float) -> tuple[tuple[str, int], ...]:
    """A connection was let in by its certificate when it was made: this bounds how long one lasts that would not be
    now. Calls under way end on the former one, and clients notice nothing."""
    return (
        ("grpc.max_connection_age_ms", round(age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", round(MAX_DEADLINE_S * 1000)),
    )
