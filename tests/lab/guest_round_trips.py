"""Runs in the guest, as ``python guest_round_trips.py CASE``; prints what it saw as one JSON object."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshfusion.tools.lab.guest_setup import initiator
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_file_device, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import (
    RdmaPath,
    remove_links,
    soft_roce_on_dummy,
    soft_roce_paths,
)
from meshfusion.tools.lab.guest_setup.nvmet import Port, Subsystem, export, remove_exports
from meshfusion.tools.lab.guest_setup.shaping import Shaping
from meshfusion.tools.lab.guest_setup.steps import output_of

NQN = "nqn.2026-01.io.meshfusion:test"
DATA_BYTES = 8 << 20
TRANSFER_BYTES = 1 << 20
SIZE_MIB = 64
PATH_RATE_MBIT = 200.0


@contextmanager
def opened_direct(device: Path) -> Iterator[int]:
    """Past every cache: what is read comes over the wire, or from the medium."""
    fd = os.open(device, os.O_RDWR | os.O_DIRECT)
    try:
        yield fd
    finally:
        os.close(fd)


def write(device: Path, data: bytes) -> float:
    """From the device's start; the seconds it took."""
    buffer = mmap.mmap(-1, TRANSFER_BYTES)  # aligned, as O_DIRECT wants it
    began = time.monotonic()
    with opened_direct(device) as fd:
        for offset in range(0, len(data), TRANSFER_BYTES):
            buffer[:] = data[offset : offset + TRANSFER_BYTES]
            assert os.pwritev(fd, [buffer], offset) == TRANSFER_BYTES
    return time.monotonic() - began


def read(device: Path, length: int) -> tuple[bytes, float]:
    """From the device's start, and the seconds it took."""
    buffer = mmap.mmap(-1, TRANSFER_BYTES)
    parts = []
    began = time.monotonic()
    with opened_direct(device) as fd:
        for offset in range(0, length, TRANSFER_BYTES):
            assert os.preadv(fd, [buffer], offset) == TRANSFER_BYTES
            parts.append(buffer[:])
    return b"".join(parts), time.monotonic() - began


def take_down() -> list[str]:
    """What could not be removed, and what is left although it could."""
    initiator.disconnect_all()
    failures = [*remove_exports(), *remove_devices(), *remove_links()]
    left = [output_of("rdma", "link"), *(str(p) for p in Path("/sys/kernel/config/nvmet").glob("*/*"))]
    return failures + [text for text in left if text.strip()]


def round_trip() -> dict[str, object]:
    """Over one soft-RoCE device, to a device in memory and one over a file."""
    began = time.monotonic()
    link = soft_roce_on_dummy()
    devices = (
        make_memory_device(MemoryDevice("mf0", SIZE_MIB)),
        make_file_device(Path("/tmp/namespace.img"), SIZE_MIB),
    )
    export([Subsystem(NQN, devices)], [Port(1, link.address, (NQN,))])
    setup_s = time.monotonic() - began
    began = time.monotonic()
    initiator.connect(NQN, link.address)
    remote = initiator.block_devices(NQN, len(devices))
    connect_s = time.monotonic() - began
    results = []
    for ours, theirs in zip(remote, devices, strict=True):
        data = os.urandom(DATA_BYTES)
        write_s = write(ours, data)
        got, read_s = read(ours, DATA_BYTES)
        results.append(
            {
                "remote": str(ours),
                "backing": str(theirs),
                "read_back": got == data,
                "on_the_medium": read(theirs, DATA_BYTES)[0] == data,
                "write_mb_per_s": round(DATA_BYTES / write_s / 1e6),
                "read_mb_per_s": round(DATA_BYTES / read_s / 1e6),
            }
        )
    mtu = output_of("ibv_devinfo", "-d", link.device).partition("active_mtu:")[2].split()[0]
    keys = register_memory(link.device)
    initiator.disconnect(NQN)
    gone = not any(path.exists() for path in remote)
    return {
        "setup_s": round(setup_s, 3),
        "connect_s": round(connect_s, 3),
        "namespaces": results,
        "active_mtu_bytes": int(mtu),
        "memory_keys": keys,
        "gone_after_disconnect": gone,
        "left": take_down(),
    }


def register_memory(device: str) -> dict[str, object]:
    """A memory region over an array of ours, by the distribution's pyverbs in this Python."""
    import numpy as np
    import pyverbs
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    try:
        import pyverbs.enums as enums
    except ImportError:
        import pyverbs.libibverbs_enums as enums  # since rdma-core 51 or so
    array = np.zeros(1 << 20, np.uint8)
    access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
    with Context(name=device) as context, PD(context) as domain:
        region = MR(domain, array.nbytes, access, address=array.ctypes.data)
        seen = {"length": region.length, "lkey": region.lkey, "rkey": region.rkey, "from": pyverbs.__path__[0]}
        region.close()
    return {**seen, "python": sys.executable}


def two_paths() -> dict[str, object]:
    """One subsystem over two veth pairs of a fixed rate, each connected and measured by itself."""
    paths = soft_roce_paths(2, shaping=Shaping(rate_mbit=PATH_RATE_MBIT))
    device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
    ports = [Port(number, path.target.address, (NQN,)) for number, path in enumerate(paths, start=1)]
    export([Subsystem(NQN, (device,))], ports)
    measured = [measure_path(path) for path in paths]
    return {"paths": measured, "left": take_down()}


def measure_path(path: RdmaPath) -> dict[str, object]:
    initiator.connect(NQN, path.target.address, host_address=path.host.address)
    (remote,) = initiator.block_devices(NQN, 1)
    before = sent_bytes(path)
    data = os.urandom(DATA_BYTES)
    write_s = write(remote, data)
    got, read_s = read(remote, DATA_BYTES)
    after = sent_bytes(path)
    initiator.disconnect(NQN)
    return {
        "read_back": got == data,
        "write_mbit_per_s": DATA_BYTES * 8 / write_s / 1e6,
        "read_mbit_per_s": DATA_BYTES * 8 / read_s / 1e6,
        "sent_by_host_bytes": after[0] - before[0],
        "sent_by_target_bytes": after[1] - before[1],
    }


def sent_bytes(path: RdmaPath) -> tuple[int, int]:
    """By the host's end and by the target's."""
    host, target = (
        int(Path(f"/sys/class/net/{link.interface}/statistics/tx_bytes").read_text())
        for link in (path.host, path.target)
    )
    return host, target


def drives() -> dict[str, object]:
    """The emulated machine's NVMe drives, by the kernel's names."""
    found = {}
    for queue in sorted(Path("/sys/block").glob("nvme*/queue")):
        if (queue.parent / "hidden").read_text().strip() != "0":
            continue  # a path to a drive
        sectors = int((queue.parent / "size").read_text())
        found[queue.parent.name] = {"size_mib": sectors >> 11, "zoned": (queue / "zoned").read_text().strip()}
    return {"drives": found}


if __name__ == "__main__":
    cases = {"round_trip": round_trip, "two_paths": two_paths, "drives": drives}
    print(json.dumps(cases[sys.argv[1]]()))
