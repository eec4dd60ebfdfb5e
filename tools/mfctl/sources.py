"""Where a command reads from: a running service, or a pool on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from meshfusion.dpu.api.types import ChunkRecord, ChunkService, ListReply, ListRequest, PoolStatus
from meshfusion.jbof.errors import ServiceUnavailableError
from meshfusion.tools.mfctl.completing import service_names
from meshfusion.tools.mfctl.context_choice import services_of
from meshfusion.tools.mfctl.encrypted_pools import drives_open
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.service_access import access_to

if TYPE_CHECKING:
    from meshfusion.dpu.index import Index

F = TypeVar("F", bound=Callable[..., Any])


def source_options(command: F) -> F:
    """Adds ``--service``, ``--pool`` and ``--timeout`` to a command that also takes a PATH."""
    command = click.option(
        "--timeout", "timeout_s", type=FiniteRange(0.01, 600), default=5.0, show_default=True, metavar="SECONDS",
        help="How long to wait for an answer of the service.",
    )(command)  # fmt: skip
    command = click.option(
        "--pool", "pool_name", default="", metavar="NAME", help="With --service: which pool, where it has several.",
    )(command)  # fmt: skip
    return service_option("Ask the running service at unix:///path or host:port instead of opening a pool.")(command)


def service_option(text: str) -> Callable[[F], F]:
    """``--service``, as all commands have it; ``text``: what it means to this one."""
    return click.option(
        "--service", "address", metavar="ADDRESS", shell_complete=service_names,
        help=f"{text} Or the name of one of the context.",
    )  # fmt: skip


def pool_status(path: Path) -> PoolStatus:
    """Read from the medium, beside whoever owns the pool."""
    from meshfusion.dpu.pool import inspect_pool

    with drives_open(path):
        return inspect_pool(path)


def service_status(address: str, pool_name: str, timeout_s: float) -> PoolStatus:
    with _client(address, pool_name) as client:
        return client.status(deadline_s=timeout_s)


class ChunkReader(Protocol):
    """What listing needs; a whole :class:`~meshfusion.dpu.api.types.ChunkService` is one."""

    def list_chunks(self, request: ListRequest, *, deadline_s: float) -> ListReply: ...
    def get_chunk(self, key: bytes, *, deadline_s: float) -> ChunkRecord | None: ...


@contextmanager
def open_chunks(path: Path | None, address: str | None, pool_name: str) -> Iterator[ChunkReader]:
    """Chunks of one service, or of a pool on this machine, read beside whoever owns it."""
    services = services_of(path, address, pool_name)
    if services is not None:
        with _client(services.only.address, pool_name) as client:
            yield client
        return
    from meshfusion.dpu.pool import inspect_pool
    from meshfusion.dpu.pool_inspect import open_for_reading

    assert path is not None
    with drives_open(path):
        # It looks at the index from a child process: a damaged one can kill whoever maps it.
        inspect_pool(path)
        with open_for_reading(path) as (_, _, index):
            yield _IndexReader(index)


@contextmanager
def _client(address: str, pool_name: str) -> Iterator[ChunkService]:
    from meshfusion.dpu.api.client import GrpcChunkService

    client = GrpcChunkService(address, access_to(address), pool=pool_name)
    try:
        with explained(address):
            yield client
    finally:
        client.close()


@contextmanager
def explained(address: str) -> Iterator[None]:
    """Of a service at ``address`` that cannot be reached, tell when that is for lack of permission."""
    try:
        yield
    except ServiceUnavailableError as e:
        owner = _unusable_socket(address)
        if owner is None:
            raise
        raise ServiceUnavailableError(
            f"the chunk service at {address} does not let this user (uid {os.getuid()}) connect",
            next_step=f"Run this as the user of the service{owner}.",
        ) from e


def _unusable_socket(address: str) -> str | None:
    """When permissions keep this user from the socket: who may use it, as far as that can be seen. Else None."""
    from meshfusion.dpu.api.address import UnixAddress, parse_address

    parsed = parse_address(address)
    if not isinstance(parsed, UnixAddress):
        return None
    try:
        owner_uid = parsed.path.stat().st_uid
    except PermissionError:
        return ""
    except OSError:
        return None
    return None if os.access(parsed.path, os.W_OK) else f" (uid {owner_uid})"


class _IndexReader:
    def __init__(self, index: Index) -> None:
        self._index = index

    def list_chunks(self, request: ListRequest, *, deadline_s: float) -> ListReply:
        from meshfusion.dpu.pool import list_chunks

        return list_chunks(self._index, request)

    def get_chunk(self, key: bytes, *, deadline_s: float) -> ChunkRecord | None:
        return self._index.get_many((key,)).get(key)
