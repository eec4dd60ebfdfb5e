"""Where a command reads from: a running service, or a pool on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from meshfusion.dpu.api.types import ChunkService, PoolStatus
from meshfusion.jbof.errors import PoolBusyError

F = TypeVar("F", bound=Callable[..., Any])


def source_options(command: F) -> F:
    """Adds ``--service`` and ``--timeout`` to a command that also takes a PATH."""
    command = click.option(
        "--timeout", "timeout_s", type=click.FloatRange(0.01, 600), default=5.0, show_default=True, metavar="SECONDS",
        help="How long to wait for an answer of the service.",
    )(command)  # fmt: skip
    return click.option(
        "--service", "address", metavar="ADDRESS",
        help="Ask the running service at unix:///path or host:port instead of opening a pool.",
    )(command)  # fmt: skip


def require_one_source(path: Path | None, address: str | None) -> None:
    if (path is None) == (address is None):
        raise click.UsageError("Name either the PATH of a pool or --service ADDRESS.")


def read_status(path: Path | None, address: str | None, timeout_s: float) -> PoolStatus:
    """The status from the service, or read from the medium beside whoever owns the pool."""
    require_one_source(path, address)
    if address is not None:
        with open_source(None, address) as source:
            return source.status(deadline_s=timeout_s)
    from meshfusion.dpu.pool import inspect_pool

    assert path is not None
    return inspect_pool(path)


@contextmanager
def open_source(path: Path | None, address: str | None) -> Iterator[ChunkService]:
    """A chunk service to ask; closed at the end."""
    require_one_source(path, address)
    source: ChunkService
    if address is not None:
        from meshfusion.dpu.api.client import GrpcChunkService

        source = GrpcChunkService(address)
    else:
        from meshfusion.dpu.pool import Pool, PoolOptions

        assert path is not None
        try:
            source = Pool.open(path, PoolOptions())
        except PoolBusyError as e:
            raise PoolBusyError(
                e.message, next_step="Ask the service that owns it: use --service ADDRESS instead of the path."
            ) from e
    try:
        yield source
    finally:
        source.close()
