"""Runs in the guest, as ``python guest_pool_drives.py TARGET``: a pool of two drives, exported by its service, and the
path to both. ``TARGET``: the kernel's (``nvmet``), or the SPDK that ``MESHFUSION_TEST_NVMF_TGT`` names (``spdk``).

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api import types as api
from meshfusion.dpu.config_exports import ExportsConfig, SpdkConfig
from meshfusion.dpu.export.opening import keeper_of
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.path.cpus import engine_cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.opening import PathOpener
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.shards import ShardWrite
from meshfusion.jbof.errors import ServiceUnavailableError
from meshfusion.jbof.format import LBA_BYTES, ChunkHeader
from meshfusion.jbof.pool_addresses import pool_lba
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device
from meshfusion.tools.lab.guest_setup.links import soft_roce_on_dummy
from meshfusion.tools.lab.guest_setup.steps import load_modules
from tests.host.support.kv_memory import KvMemory
from tests.lab.guest_initiator import take_down
from tests.lab.guest_path import KERNELS, memory, save, wait

SIZE_MIB, SEGMENT_BYTES = 24, 2 << 20
CHUNKS, UNITS = 6, 2
DEADLINE_S, START_S = 20.0, 60.0
IDENTITY = b"I" * 32


@contextlib.contextmanager
def exports(target: str, address: str) -> Iterator[ExportsConfig]:
    """What the service is configured with, and the target for it."""
    portals = [f"rdma://{address}:4420"]
    if target == "nvmet":
        load_modules("nvmet", "nvmet-rdma")
        yield ExportsConfig(target="nvmet", portals=portals, authenticate=False)
        return
    socket, log = Path("/tmp/spdk.sock"), Path("/tmp/nvmf.log")
    options = ["--no-huge", "-s", "512", "-m", "0x1", "--no-pci", "--wait-for-rpc", "--iova-mode=va", "-r", str(socket)]
    with log.open("wb") as output:
        process = subprocess.Popen([os.environ["MESHFUSION_TEST_NVMF_TGT"], *options], stdout=output, stderr=output)
    try:
        yield ExportsConfig(
            target="spdk",
            portals=portals,
            authenticate=False,
            spdk=SpdkConfig(socket=socket, memory=512 << 20, connections=8),
        )
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        process.kill()
        process.wait()


def attached(pool: Pool) -> api.Attachment:
    """The target may be starting."""
    request = api.AttachRequest("one", "vllm", "1", "h", os.getpid(), IDENTITY, 1, access=api.Access.NVMEOF)
    end_s = time.monotonic() + START_S
    while True:
        try:
            return pool.attach(request, deadline_s=DEADLINE_S)
        except ServiceUnavailableError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.5)


def opened(kv: KvMemory, attachment: api.Attachment) -> DataPath:
    opener = PathOpener(
        memory=HostKvMemory(kv.memory, KERNELS),
        layouts=(kv.layout,),
        units_per_shard=(UNITS,),
        load_threads=2,
        direct_io=True,
        cpus=engine_cpus(),
        is_digest_right=operator.eq,
    )
    return opener.open(PathKind.RDMA, attachment)


def key(chunk: int) -> bytes:
    return bytes([chunk + 1]) * 32


def header_of(attachment: api.Attachment, kv: KvMemory, chunk: int, extent: api.Extent) -> ChunkHeader:
    return ChunkHeader(
        pool_uuid=uuid.UUID(attachment.pool_uuid).bytes,
        identity=IDENTITY,
        key=key(chunk),
        tenant="default",
        group=0,
        rank=0,
        shard_count=1,
        position_tokens=16 * chunk,
        token_count=16,
        segment=extent.segment,
        generation=extent.generation,
        lba=extent.lba,
        unit_bytes=kv.layout.unit_bytes,
        unit_digests=(),
    )


def store(pool: api.ChunkService, attachment: api.Attachment, path: DataPath, kv: KvMemory, chunk: int) -> None:
    """Blocks 2n and 2n + 1, as an engine stores them."""
    _, is_committed = try_to_store(pool, attachment, path, kv, chunk, 2 * chunk)
    assert is_committed


def try_to_store(
    pool: api.ChunkService, attachment: api.Attachment, path: DataPath, kv: KvMemory, chunk: int, first: int
) -> tuple[api.Extent, bool]:
    """Block ``first`` and the next. Where it was written, and whether that is committed."""
    size = api.ShardSize(0, kv.layout.unit_bytes, UNITS)
    item = api.ReserveItem(key(chunk), 0, 16 * chunk, 16, (size,))
    request = api.ReserveRequest(attachment.holder_id, attachment.epoch, (item,))
    (result,) = pool.reserve(request, deadline_s=DEADLINE_S).results
    (extent,) = result.extents
    header = header_of(attachment, kv, chunk, extent)
    written = save(path, ShardWrite((0, chunk), extent, header, (first, first + 1)))
    assert written.unit_digests is not None, written
    commit = api.CommitItem(result.grant_id, (written.unit_digests,))
    reply = pool.commit(api.CommitRequest(attachment.holder_id, attachment.epoch, (commit,)), deadline_s=DEADLINE_S)
    return extent, reply.committed == (True,)


def reads(found: api.MatchReply) -> list[UnitRead]:
    """All units, into blocks from 12 on."""
    wanted: list[UnitRead] = []
    for chunk in found.chunks:
        (shard,) = chunk.shards
        first = pool_lba(shard.extent.namespace, shard.extent.lba + shard.payload_lba_offset)
        for unit, digest in enumerate(shard.unit_digests):
            lba = first + unit * shard.unit_lba_count
            wanted.append(UnitRead(lba, shard.unit_bytes, 12 + len(wanted), digest))
    return wanted


def main(target: str) -> dict[str, object]:
    link = soft_roce_on_dummy()
    devices = [make_memory_device(MemoryDevice(f"mf{number}", SIZE_MIB)) for number in range(2)]
    folder = Path(tempfile.mkdtemp()) / "pool"
    create_pool_of_drives(folder, size_bytes=SIZE_MIB << 20, segment_bytes=SEGMENT_BYTES, data_paths=devices)
    kv = memory()
    kv.fill(5)
    with (
        exports(target, link.address) as config,
        Pool.open(folder, exports=partial(keeper_of, config)) as pool,
    ):
        attachment = attached(pool)
        path = opened(kv, attachment)
        expected = [kv.unit(block) for block in range(CHUNKS * UNITS)]
        for chunk in range(CHUNKS):
            store(pool, attachment, path, kv, chunk)
        group = api.GroupKeys(0, tuple(map(key, range(CHUNKS))), (0,) * CHUNKS)
        found = pool.match(api.MatchRequest("one", "r", 16, (group,)), deadline_s=DEADLINE_S)
        drives = Counter(chunk.shards[0].extent.namespace for chunk in found.chunks)
        on_medium = [unit_on_medium(devices, chunk) for chunk in found.chunks]
        kv.fill(6)
        result = wait(path.load(reads(found), abandon_after_s=20))
        arrived = [kv.unit(12 + i) for i in range(CHUNKS * UNITS)]
        is_quiet = path.close()
        with devices[1].open("r+b") as device:  # another drive's label, in a way: none
            device.write(bytes(2 * LBA_BYTES))
            os.fsync(device.fileno())
        path = opened(kv, attachment)
        without = wait(path.load(reads(found), abandon_after_s=20))
        path.close()
    return {
        "namespaces": [namespace.nsid for namespace in attachment.namespaces],
        "drives": sorted(drives.items()),
        "on_medium": on_medium == expected[::UNITS],
        "failures": len(result.failures),
        "arrived": arrived == expected,
        "is_quiet": is_quiet,
        "without": sorted({failure.reason for failure in without.failures}),
        "without_count": len(without.failures),
        "left": take_down(),
    }


def unit_on_medium(devices: list[Path], chunk: api.ChunkRecord) -> bytes:
    """The chunk's first one, read behind everybody's back."""
    (shard,) = chunk.shards
    with devices[shard.extent.namespace - 1].open("rb") as medium:
        medium.seek((shard.extent.lba + shard.payload_lba_offset) * LBA_BYTES)
        return medium.read(shard.unit_bytes)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
