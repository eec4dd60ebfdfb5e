"""Runs in the guest, as ``python guest_path_trial.py CASE``: ``mfctl path`` beside a service, without an engine.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.path.flexpath.page import decode_page, page_name
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.opening import PathOpener
from meshfusion.host.path.path_kind import PathKind
from meshfusion.jbof.digest import load_kernels
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import RdmaPath, cut_path, restore_path, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import remove_exports
from meshfusion.tools.lab.guest_setup.steps import load_modules
from meshfusion.tools.mfctl.path_trial import attached
from tests.e2e.daemon import Daemon
from tests.host.support.kv_memory import layer_outermost
from tests.host.support.waiting import until

SIZE_MIB = 128
UNITS, LOADS = 24, 8
MFCTL = "from meshfusion.tools.mfctl.main import main; main()"


def sent_bytes(path: RdmaPath) -> int:
    """By the target, over the wire."""
    return int(Path(f"/sys/class/net/{path.target.interface}/statistics/tx_bytes").read_text())


def written_sectors(device: Path) -> int:
    """Source: Linux, Documentation/block/stat.rst, the seventh field."""
    return int(Path(f"/sys/class/block/{device.resolve().name}/stat").read_text().split()[6])


def mfctl_path(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MFCTL, "path", *arguments, "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True)


class Rig:
    """A pool on a device in memory, exported over two paths."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.paths = soft_roce_paths(2)
        load_modules("nvmet", "nvmet-rdma")
        self.device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
        portals = ", ".join(f"'rdma://{path.target.address}:4420'" for path in self.paths)
        more = f"exports: {{target: nvmet, portals: [{portals}]}}\n"
        self.daemon = Daemon(folder, data_path=self.device, more=more)
        self.daemon.start()

    def test(self) -> dict[str, Any]:
        """``mfctl path test``, and what others saw of it."""
        sent, written = [sent_bytes(path) for path in self.paths], written_sectors(self.device)
        options = ["--seconds", "1", "--size", "256KiB", "--depth", "4"]
        began_s = time.monotonic()
        done = mfctl_path("test", "--service", self.daemon.address, *options)
        seconds = time.monotonic() - began_s
        assert done.stdout, done.stderr
        self.daemon.wait_idle(holders=0, timeout_s=5.0)
        return {
            "exit_code": done.returncode,
            "paths": json.loads(done.stdout)["paths"],
            "stderr": done.stderr,
            "seconds": seconds,
            "sent_bytes": [sent_bytes(path) - before for path, before in zip(self.paths, sent, strict=True)],
            "written_sectors": written_sectors(self.device) - written,
        }

    def end(self) -> list[str]:
        self.daemon.stop()
        return [*remove_exports(), *remove_devices()]


def both(rig: Rig) -> dict[str, Any]:
    """Both paths work; then one is cut; then it is back."""
    report: dict[str, Any] = {"expected": [[path.host.address, path.target.address] for path in rig.paths]}
    report["good"] = rig.test()
    cut_path(rig.paths[0])
    report["cut"] = rig.test()
    restore_path(rig.paths[0])
    report["back"] = rig.test()
    return report


def board(rig: Rig) -> dict[str, Any]:
    """The path that a worker opens is on the board of its process, and follows orders there, until it is closed."""
    os.environ["MESHFUSION_RUN_DIR"] = "/tmp/run"
    kv = layer_outermost(blocks=UNITS, layers=3, page_bytes=64 << 10)
    client = GrpcChunkService(rig.daemon.address)
    with attached(client) as attachment:
        opener = PathOpener(
            memory=HostKvMemory(kv.memory, load_kernels(kv.layout.unit_bytes)),
            layouts=(kv.layout,),
            units_per_shard=(1,),
            load_threads=2,
            direct_io=True,
            cpus=frozenset(os.sched_getaffinity(0)),
            is_digest_right=lambda got, expected: True,  # any bytes will do
        )
        path = opener.open(PathKind.RDMA, attachment)

        def moved() -> list[int]:
            """By the target, while every block is loaded."""
            before = [sent_bytes(each) for each in rig.paths]
            units = [UnitRead(1024 + 64 * i, kv.layout.unit_bytes, i, bytes(8)) for i in range(UNITS)]
            for _ in range(LOADS):
                job = path.load(units, abandon_after_s=30.0)
                until(lambda job=job: job.result(time.monotonic()))  # type: ignore[misc]
                result = job.result(time.monotonic())
                assert result is not None
                assert not result.failures, result.failures
            return [sent_bytes(each) - sent for each, sent in zip(rig.paths, before, strict=True)]

        load_bytes = LOADS * UNITS * kv.layout.unit_bytes
        report: dict[str, Any] = {"load_bytes": load_bytes, "all": moved()}
        page = Path("/tmp/run") / page_name(os.getpid())
        until(lambda: sum(each.read_bytes for each in decode_page(page.read_bytes(), "").paths) >= load_bytes)
        (engine,) = json.loads(mfctl_path("list").stdout)["engines"]
        report["engine"], report["pid"], report["pool_uuid"] = engine, os.getpid(), attachment.pool_uuid
        first, second = (each["name"] for each in engine["paths"])
        report["exit_codes"] = [mfctl_path("disable", first).returncode]
        report["without first"] = moved()
        report["exit_codes"] += [mfctl_path(*order).returncode for order in (("enable", first), ("disable", second))]
        report["without second"] = moved()
        assert path.close()
        report["closed"] = json.loads(mfctl_path("list").stdout)["engines"]
    client.close()
    return report


CASES = (both, board)

if __name__ == "__main__":
    case = {case.__name__: case for case in CASES}[sys.argv[1]]
    rig = Rig(Path("/tmp/rig"))
    print(json.dumps({**case(rig), "left": rig.end()}))
