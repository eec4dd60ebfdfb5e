"""Runs in a guest whose one wire leads to a virtual DPU: ``python guest_dpu_client.py CASE FOLDER``.

An engine's side without an engine: the service is called over TLS with the files in FOLDER, the bytes go over RDMA with
the path that engines use. ``save`` writes chunks and commits them; ``load`` asks for the same ones, and compares what
arrives with what was written. Both begin from the same numbers, so that nothing has to be handed over.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.host.path.data_path import DataPath
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.lab.guest_setup.steps import carry_out, load_modules, run
from tests.host.support.kv_memory import KvMemory
from tests.lab.guest_path import memory, wait
from tests.lab.guest_pool_drives import CHUNKS, IDENTITY, UNITS, key, opened, reads, store

SERVICE = "10.77.0.1:7000"
OWN_ADDRESS = "10.77.0.2/24"
INTERFACE = "eth0"
SEED, OTHER_SEED = 5, 6
DEADLINE_S = 60.0  # both ends are emulated
START_S = 300.0


def connect() -> None:
    load_modules("rdma_rxe", "rdma_ucm", "ib_uverbs", "ib_umad")
    carry_out([
        run(f"ip address add {OWN_ADDRESS} dev {INTERFACE}"),
        run(f"ip link set {INTERFACE} up"),
        run(f"rdma link add rxe0 type rxe netdev {INTERFACE}"),
    ])  # fmt: skip


def service(folder: Path) -> GrpcChunkService:
    return GrpcChunkService(
        SERVICE, ClientSecurity(folder / "ca.pem", folder / "engine-1.pem", folder / "engine-1.key")
    )


def attached(client: GrpcChunkService) -> tuple[api.Attachment, list[str]]:
    """The target may be starting; why it took more than once."""
    holder = f"client-{uuid.uuid4().hex[:8]}"
    request = api.AttachRequest(holder, "vllm", "1", "h", 1, IDENTITY, 1, access=api.Access.NVMEOF)
    end_s = time.monotonic() + START_S
    refusals: list[str] = []
    while True:
        try:
            return client.attach(request, deadline_s=DEADLINE_S), refusals
        except MeshFusionError as error:
            refusals.append(str(error))
            if time.monotonic() > end_s:
                raise
            time.sleep(2)


@contextmanager
def engine(folder: Path) -> Iterator[tuple[GrpcChunkService, api.Attachment, DataPath, KvMemory]]:
    client = service(folder)
    attachment, _ = attached(client)
    kv = memory()
    path = opened(kv, attachment)
    try:
        yield client, attachment, path, kv
    finally:
        path.close()
        client.detach(api.DetachRequest(attachment.holder_id), deadline_s=DEADLINE_S)
        client.close()


def save(folder: Path) -> dict[str, object]:
    with engine(folder) as (client, attachment, path, kv):
        kv.fill(SEED)
        for chunk in range(CHUNKS):
            store(client, attachment, path, kv, chunk)
        return {"saved": CHUNKS, "drives": len(attachment.namespaces)}


def load(folder: Path) -> dict[str, object]:
    with engine(folder) as (client, attachment, path, kv):
        kv.fill(SEED)
        expected = [kv.unit(block) for block in range(CHUNKS * UNITS)]
        kv.fill(OTHER_SEED)
        group = api.GroupKeys(0, tuple(map(key, range(CHUNKS))), (0,) * CHUNKS)
        found = client.match(api.MatchRequest(attachment.holder_id, "r", 16, (group,)), deadline_s=DEADLINE_S)
        result = wait(path.load(reads(found), abandon_after_s=DEADLINE_S))
        arrived = [kv.unit(12 + unit) for unit in range(CHUNKS * UNITS)]
        client.release(api.ReleaseRequest(attachment.holder_id, (found.lease_id,)), deadline_s=DEADLINE_S)
        return {
            "hits": found.chunk_count,
            "drives": len(Counter(chunk.shards[0].extent.namespace for chunk in found.chunks)),
            "failures": [failure.reason for failure in result.failures],
            "right": sum(got == wanted for got, wanted in zip(arrived, expected, strict=True)),
            "bytes": result.load_bytes,
        }


CASES = {case.__name__: case for case in (save, load)}

if __name__ == "__main__":
    connect()
    print(json.dumps(CASES[sys.argv[1]](Path(sys.argv[2]))))
