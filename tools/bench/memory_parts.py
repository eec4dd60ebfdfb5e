"""What the connector's memory consists of: its parts are taken up one after another, in a process that has vLLM loaded.

Prints one JSON object: part -> bytes of resident memory that it added, in all and without a file behind them. Order
matters where parts share a library.
Arguments: a scratch directory for a pool, and the bytes of a unit.
"""

from __future__ import annotations

import importlib
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshfusion.tools.bench.processes import memory_of

LOAD_THREADS = 2
READ_BYTES = 4 << 20
POOL_BYTES = 1 << 30
ENGINE_MODULES = ("vllm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")


def main() -> None:
    directory, unit_bytes = Path(sys.argv[1]), int(sys.argv[2])
    for name in ENGINE_MODULES:
        importlib.import_module(name)
    added: dict[str, dict[str, int]] = {}
    kept: list[Any] = []  # everything stays alive until the end

    def take_up(part: str, work: Callable[[], Any]) -> None:
        before = memory_of()
        kept.append(work())
        after = memory_of()
        added[part] = {
            "rss_bytes": after.rss_bytes - before.rss_bytes,
            "anonymous_bytes": after.anonymous_bytes - before.anonymous_bytes,
        }

    take_up("connector modules", lambda: importlib.import_module("meshfusion.host.connector.vllm.connector"))
    already = [name for name in ("numba", "grpc", "lmdb") if name in sys.modules]
    take_up("numba", lambda: importlib.import_module("numba"))
    take_up("compiled kernels", lambda: importlib.import_module("meshfusion.jbof.digest_kernels"))
    take_up("digest keys", lambda: _load_kernels(unit_bytes))
    take_up("lmdb and pool, embedded form", lambda: _open_pool(directory))
    take_up("grpc and client, service form", _open_client)
    take_up("staging", lambda: [_touched(READ_BYTES) for _ in range(LOAD_THREADS)] + [_touched(unit_bytes + 4096)])
    print(json.dumps({"added": added, "loaded_by_vllm_already": already}))


def _load_kernels(unit_bytes: int) -> Any:
    from meshfusion.jbof.digest import load_kernels

    return load_kernels(unit_bytes)


def _open_pool(directory: Path) -> Any:
    from meshfusion.dpu.pool import Pool, create_pool

    create_pool(directory / "parts-pool", size_bytes=POOL_BYTES)
    return Pool.open(directory / "parts-pool")


def _open_client() -> Any:
    from meshfusion.dpu.api.client import GrpcChunkService

    return GrpcChunkService("unix:///nowhere/nobody-listens.sock")


def _touched(size_bytes: int) -> Any:
    from meshfusion.jbof.media.buffer import AlignedBuffer

    buffer = AlignedBuffer(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    buffer.array[:] = 1
    return buffer


if __name__ == "__main__":
    main()
