"""Runs in the guest, as ``python guest_path.py CASE``: the direct path between KV memory and the kernel's target.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import LoadJob, LoadResult
from meshfusion.host.path.rdma import rdma_path
from meshfusion.host.path.shards import ShardWrite, ShardWritten
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.format import (
    LBA_BYTES,
    decode_chunk_header,
)
from meshfusion.jbof.nvme.controller_effects import ControllerState
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device
from meshfusion.tools.lab.guest_setup.links import cut_path, restore_path, soft_roce_on_dummy, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import Port, Subsystem, export
from tests.host.support.kv_memory import KvMemory, layer_outermost
from tests.host.support.shard_writes import reads_of, shard_write
from tests.lab.guest_initiator import NQN, SIZE_MIB, join, take_down, until

NSID = 1
FIRST_LBA = 256
SOURCES, TARGETS = range(0, 8), range(12, 20)
MAX_UNITS = len(SOURCES)
KERNELS = load_kernels(1 << 20)


def memory() -> KvMemory:
    """Units of three runs of 64 KiB, apart in memory: a command for each run.

    Small, because each of a process's pages in such a guest is a mapping of its own on the host, which has a limit.
    """
    return layer_outermost(blocks=24, layers=3, page_bytes=64 << 10)


def opened(kv: KvMemory, address: str, **settings: Any) -> tuple[DataPath, Initiator]:
    initiator, _ = join(address, **settings)
    path = rdma_path(
        initiator,
        {NSID},
        HostKvMemory(kv.memory, KERNELS),
        (kv.layout,),
        lba_bytes=LBA_BYTES,
        load_threads=2,
        read_bytes=2 << 20,
        max_units=MAX_UNITS,
    )
    return path, initiator


def shard(kv: KvMemory, block_ids: range) -> ShardWrite:
    return shard_write(kv.layout.unit_bytes, block_ids, FIRST_LBA)


def save(path: DataPath, write: ShardWrite) -> ShardWritten:
    path.save([write])
    taken: list[ShardWritten] = []

    def look() -> object:
        taken.extend(path.take_written())
        return taken

    until(look)
    return taken[0]


def wait(job: LoadJob) -> LoadResult:
    results: list[LoadResult | None] = [None]

    def look() -> object:
        results[0] = job.result(time.monotonic())
        return results[0]

    until(look)
    assert results[0] is not None
    return results[0]


def flip(device: Path, lba: int) -> None:
    """One bit on the medium, behind everybody's back."""
    fd = os.open(device, os.O_RDWR)
    byte = os.pread(fd, 1, lba * LBA_BYTES)[0]
    os.pwrite(fd, bytes([byte ^ 1]), lba * LBA_BYTES)
    os.fsync(fd)
    os.close(fd)


def round_trip() -> dict[str, object]:
    """Saved from some blocks, loaded into others, over the wire; what lies on the medium; a flipped bit."""
    link = soft_roce_on_dummy()
    device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
    export([Subsystem(NQN, (device,))], [Port(1, link.address, (NQN,))])
    kv = memory()
    kv.fill(5)
    path, _ = opened(kv, link.address)
    write = shard(kv, SOURCES)
    expected = [kv.unit(block) for block in SOURCES]
    digests = save(path, write).unit_digests
    assert digests is not None
    with device.open("rb") as medium:
        medium.seek(FIRST_LBA * LBA_BYTES)
        raw = medium.read(write.extent.lba_count * LBA_BYTES)
    reads = reads_of(write, digests, TARGETS)
    on_medium = [raw[(read.lba - FIRST_LBA) * LBA_BYTES :][: read.unit_bytes] for read in reads]
    kv.fill(6)
    before = kv.memory.copy()
    result = wait(path.load(reads, abandon_after_s=20))
    arrived = [kv.unit(block) for block in TARGETS]
    untouched = kv.untouched_except(before, list(TARGETS))
    flip(device, reads[3].lba + 1)
    again = wait(path.load(reads, abandon_after_s=20))
    is_quiet = path.close()
    return {
        "on_medium": on_medium == expected,
        "header": decode_chunk_header(raw).unit_digests == digests,
        "failures": len(result.failures),
        "arrived": arrived == expected,
        "untouched": bool(untouched),
        "mb_per_s": round(result.load_bytes / result.seconds / 1e6),
        "after_flip": [(failure.index, failure.is_mismatch) for failure in again.failures],
        "is_quiet": is_quiet,
        "left": take_down(),
    }


def cut_while_loading() -> dict[str, object]:
    """The cable is drawn: the blocks come back when nobody can write them any more, and stay as they are left then."""
    (path_link,) = soft_roce_paths(1)
    device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
    export([Subsystem(NQN, (device,))], [Port(1, path_link.target.address, (NQN,))])
    kv = memory()
    kv.fill(5)
    path, initiator = opened(kv, path_link.target.address, source_address=path_link.host.address, backoff_first_s=0.2)
    write = shard(kv, SOURCES)
    digests = save(path, write).unit_digests
    assert digests is not None
    reads = reads_of(write, digests, TARGETS)
    cut_path(path_link)
    began = time.monotonic()
    job = path.load(reads, abandon_after_s=1.0)
    result = wait(job)
    told_s = time.monotonic() - began
    blocks = kv.byte_places[TARGETS.start : TARGETS.stop].ravel()
    kv.memory[blocks] = 0xA5  # the engine uses them for something else
    restore_path(path_link)
    until(lambda: initiator.state is ControllerState.LIVE)
    time.sleep(0.5)
    left_alone = bool((kv.memory[blocks] == 0xA5).all())
    after = wait(path.load(reads, abandon_after_s=20))
    same = [kv.unit(block) for block in TARGETS] == [kv.unit(block) for block in SOURCES]
    is_quiet = path.close()
    return {
        "told_s": round(told_s, 2),
        "failed": len(result.failures),
        "mismatches": sum(failure.is_mismatch for failure in result.failures),
        "left_alone": left_alone,
        "after": len(after.failures),
        "same": same,
        "is_quiet": is_quiet,
        "left": take_down(),
    }


CASES = (round_trip, cut_while_loading)

if __name__ == "__main__":
    np.seterr(all="raise")
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
