"""Runs in the guest, as ``python guest_block.py CASE``: the block path on a namespace that the kernel's initiator has
attached over NVMe/TCP, from the kernel's target.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.host.path.block import block_path
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.shards import ShardWritten
from meshfusion.jbof.format import LBA_BYTES, decode_chunk_header
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DirectMode, open_data_file
from meshfusion.tools.lab.guest_setup import initiator
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.nvmet import (
    Port,
    Subsystem,
    export,
    offer_steps,
    remove_exports,
    withdraw_steps,
)
from meshfusion.tools.lab.guest_setup.shaping import Shaping, shaping_steps
from meshfusion.tools.lab.guest_setup.steps import carry_out, run
from tests.host.support.kv_memory import KvMemory, block_outermost, layer_outermost
from tests.host.support.shard_writes import reads_of, shard_write
from tests.lab.guest_initiator import until
from tests.lab.guest_path import FIRST_LBA, KERNELS, MAX_UNITS, SOURCES, TARGETS, flip, save, shard, wait

NQN = "nqn.2026-01.io.meshfusion:block"
ADDRESS = "127.0.0.1"
SIZE_MIB = 64
PORT = Port(1, ADDRESS, (NQN,), transport="tcp")
FAIL_S = 2
PATIENCE = ("--reconnect-delay=1", "--ctrl-loss-tmo=600", "--keep-alive-tmo=1")
STATE = Path("/sys/class/nvme/nvme0/state")
OTHER_LBA = 4096
LOAD_S = 0.5
"""A load's time: over long before the kernel gives its reads up."""


def attach() -> tuple[Path, Path]:
    """(the device over the wire, the one behind the target)."""
    carry_out([run("ip link set lo up")])
    device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
    export([Subsystem(NQN, (device,))], [PORT])
    initiator.connect(NQN, ADDRESS, transport="tcp", more=PATIENCE)
    (remote,) = initiator.block_devices(NQN, 1)
    for controller in Path("/sys/class/nvme").iterdir():
        (controller / "fast_io_fail_tmo").write_text(str(FAIL_S))  # nvme-connect(1) of Debian 12 has no such option
    return remote, device


def take_down() -> list[str]:
    initiator.disconnect_all()
    return [*remove_exports(), *remove_devices()]


def opened(remote: Path, kv: KvMemory) -> DataPath:
    return block_path(
        open_data_file(remote, writable=True, direct=DirectMode.REQUIRED),
        kv.memory,
        (kv.layout,),
        KERNELS,
        lba_bytes=LBA_BYTES,
        load_threads=2,
        read_bytes=1 << 20,
        max_units=MAX_UNITS,
    )


def on_medium(device: Path, lba_count: int) -> bytes:
    """Past the page cache of this device, which knows nothing of what came over the wire."""
    with open_data_file(device, writable=False, direct=DirectMode.REQUIRED) as data:
        buffer = AlignedBuffer(lba_count * LBA_BYTES)
        data.read_into(FIRST_LBA, buffer.view)
        return bytes(buffer.view)


def round_trip() -> dict[str, object]:
    """Saved over the wire and loaded into other blocks, in both layouts; what lies on the medium; a flipped bit."""
    remote, device = attach()
    rounds = []
    for kv in (
        layer_outermost(blocks=24, layers=3, page_bytes=64 << 10, gap_bytes=LBA_BYTES, lead_bytes=LBA_BYTES),
        block_outermost(blocks=24, layers=3, page_bytes=20 << 10),
    ):
        kv.fill(5)
        path = opened(remote, kv)
        write = shard(kv, SOURCES)
        expected = [kv.unit(block) for block in SOURCES]
        digests = save(path, write).unit_digests
        assert digests is not None
        raw = on_medium(device, write.extent.lba_count)
        reads = reads_of(write, digests, TARGETS)
        kv.fill(6)
        before = kv.memory.copy()
        result = wait(path.load(reads, abandon_after_s=20))
        arrived = [kv.unit(block) for block in TARGETS]
        untouched = kv.untouched_except(before, list(TARGETS))
        flip(device, reads[3].lba + 1)
        again = wait(path.load(reads, abandon_after_s=20))
        rounds.append(
            {
                "on_medium": [raw[(r.lba - FIRST_LBA) * LBA_BYTES :][: r.unit_bytes] for r in reads] == expected,
                "header": decode_chunk_header(raw).unit_digests == digests,
                "failures": len(result.failures),
                "arrived": arrived == expected,
                "untouched": bool(untouched),
                "after_flip": [(failure.index, failure.is_mismatch) for failure in again.failures],
                "mb_per_s": round(result.load_bytes / result.seconds / 1e6),
                "is_quiet": path.close(),
            }
        )
    with open_data_file(remote, writable=False) as data:
        alignment, links = data.alignment, data.fabrics
    assert alignment is not None
    return {
        "rounds": rounds,
        "alignment": (alignment.memory_bytes, alignment.length_bytes, alignment.is_told),
        "links": [(link.controller, link.transport, link.fails_after_s) for link in links],
        "left": take_down(),
    }


def losses() -> dict[str, object]:
    """The connection is lost while a load and a save are under way, and comes back: because packets vanish, which
    nobody is told of, and because the target ends it and listens no more."""
    remote, _ = attach()
    kv = layer_outermost(blocks=24, layers=3, page_bytes=64 << 10, gap_bytes=0, lead_bytes=0, layer_gap_bytes=0)
    kv.fill(5)
    path = opened(remote, kv)
    write = shard(kv, SOURCES)
    digests = save(path, write).unit_digests
    assert digests is not None
    reads = reads_of(write, digests, TARGETS)
    cuts = {
        "cut": (
            lambda: carry_out(shaping_steps("lo", Shaping(loss_percent=100))),
            lambda: carry_out(shaping_steps("lo", Shaping())),
        ),
        "removed": (lambda: carry_out(withdraw_steps(PORT)), lambda: carry_out(offer_steps(PORT))),
    }
    seen = {name: lose(path, kv, reads, *ways) for name, ways in cuts.items()}
    return {**seen, "is_quiet": path.close(), "left": take_down()}


def lose(
    path: DataPath, kv: KvMemory, reads: list[UnitRead], cut: Callable[[], None], restore: Callable[[], None]
) -> dict[str, object]:
    blocks = kv.byte_places[TARGETS.start : TARGETS.stop].ravel()
    kv.memory[blocks] = 0
    assert wait(path.load(reads, abandon_after_s=20)).failures == ()
    cut()
    began = time.monotonic()
    other = shard_write(kv.layout.unit_bytes, range(8, 12), OTHER_LBA)
    path.save([other])
    job = path.load(reads, abandon_after_s=LOAD_S)
    time.sleep(2 * LOAD_S)
    told_early = job.result(time.monotonic()) is not None
    result = wait(job)
    told_s = time.monotonic() - began
    (written,) = taken(path)
    kv.memory[blocks] = 0xA5  # the engine uses them for something else
    restore()
    back_s = until(lambda: STATE.read_text().strip() == "live", timeout_s=60.0)
    time.sleep(0.5)
    left_alone = bool((kv.memory[blocks] == 0xA5).all())
    until(lambda: not wait(path.load(reads, abandon_after_s=20)).failures)
    return {
        "told_early": told_early,
        "told_s": round(told_s, 2),
        "failed": len(result.failures),
        "mismatches": sum(failure.is_mismatch for failure in result.failures),
        "left_alone": left_alone,
        "fate": written.fate.value,
        "reason": written.reason,
        "back_s": round(back_s, 2),
        "same": [kv.unit(block) for block in TARGETS] == [kv.unit(block) for block in SOURCES],
        "saved_again": save(path, other).unit_digests is not None,
    }


def taken(path: DataPath) -> list[ShardWritten]:
    """When the save that is under way has ended."""
    written: list[ShardWritten] = []

    def look() -> object:
        written.extend(path.take_written())
        return written

    until(look)
    return written


CASES = (round_trip, losses)

if __name__ == "__main__":
    np.seterr(all="raise")
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
