"""Runs in the guest, as ``python guest_path_trial.py CASE``: ``mfctl path test`` against a service and no engine.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import RdmaPath, cut_path, restore_path, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import remove_exports
from meshfusion.tools.lab.guest_setup.steps import load_modules
from tests.e2e.daemon import Daemon

SIZE_MIB = 128
MFCTL = "from meshfusion.tools.mfctl.main import main; main()"


def sent_bytes(path: RdmaPath) -> int:
    """By the target, over the wire."""
    return int(Path(f"/sys/class/net/{path.target.interface}/statistics/tx_bytes").read_text())


def written_sectors(device: Path) -> int:
    """Source: Linux, Documentation/block/stat.rst, the seventh field."""
    return int(Path(f"/sys/class/block/{device.resolve().name}/stat").read_text().split()[6])


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
        command = [sys.executable, "-c", MFCTL, "path", "test", "--service", self.daemon.address, "--format", "json"]
        options = ["--seconds", "1", "--size", "256KiB", "--depth", "4"]
        began_s = time.monotonic()
        done = subprocess.run([*command, *options], capture_output=True, text=True)
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


CASES = (both,)

if __name__ == "__main__":
    case = {case.__name__: case for case in CASES}[sys.argv[1]]
    rig = Rig(Path("/tmp/rig"))
    print(json.dumps({**case(rig), "left": rig.end()}))
