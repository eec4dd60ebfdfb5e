"""Runs in the guest: exports through a real kernel's configfs, and hosts that are fenced while they write.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import threading
import time
import uuid
from pathlib import Path

from meshfusion.dpu.export.desired import Address, AnaState, Export, Host, HostKey, Listener, Namespace
from meshfusion.dpu.export.fence import Confirmed
from meshfusion.dpu.export.layout import Tenant, host_subsystem_nqn, one_subsystem_per_host
from meshfusion.dpu.export.nvmet.actual import read_actual
from meshfusion.dpu.export.nvmet.configfs import KernelConfigFs
from meshfusion.dpu.export.nvmet.target import NvmetTarget
from meshfusion.jbof.nvme.auth_keys import format_secret, key_id, new_secret
from meshfusion.tools.lab.guest_setup.block import NULL_BLK, MemoryDevice, memory_device_steps
from meshfusion.tools.lab.guest_setup.initiator import block_devices
from meshfusion.tools.lab.guest_setup.nvmet import NVMET
from meshfusion.tools.lab.guest_setup.steps import Run, Write, carry_out

PREFIX = "nqn.2026-11.io.meshfusion:lab"
IO_S = 1.0
"""Of each I/O to the first namespace."""
OTHER_KEY = format_secret(new_secret())
KEY = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:"


def host(name: str) -> str:
    return f"nqn.2026-11.io.meshfusion:host:{name}"


def desired(*hosts: Host, port: int = 4420, state: AnaState = AnaState.OPTIMIZED) -> Export:
    identities = [uuid.uuid5(uuid.NAMESPACE_URL, str(number)) for number in range(2)]
    namespaces = frozenset(
        Namespace(number + 1, identity, identity.hex, f"/dev/mf{number}") for number, identity in enumerate(identities)
    )
    listener = Listener(Address("tcp", "127.0.0.1", port), state)
    return one_subsystem_per_host(PREFIX, [Tenant("a", namespaces, frozenset(hosts))], frozenset({listener}))


def connect(host_nqn: str, owner_nqn: str = "") -> str:
    """To the owner's subsystem, by the kernel's own initiator; why it is refused, in words."""
    subsystem = host_subsystem_nqn(PREFIX, owner_nqn or host_nqn)
    text = f"transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn={subsystem},hostnqn={host_nqn}"
    text += ",reconnect_delay=1,ctrl_loss_tmo=1"  # or a write to what is gone would wait for ten minutes
    try:
        Path("/dev/nvme-fabrics").write_text(text)
    except OSError as error:
        return error.strerror or "refused"
    return ""


def write_block(device: Path, ended_s: list[float]) -> None:
    """When it ended; negative if it failed."""
    descriptor = os.open(device, os.O_WRONLY | os.O_DIRECT)
    page = mmap.mmap(-1, 4096)
    try:
        os.write(descriptor, page)
    except OSError:
        ended_s.append(-time.monotonic())
    else:
        ended_s.append(time.monotonic())


def main() -> dict[str, object]:
    carry_out([Run(("ip", "link", "set", "lo", "up"))])
    for number in range(2):
        *first, power = memory_device_steps(MemoryDevice(f"mf{number}", 16))
        slow = {"irqmode": "2", "completion_nsec": str(int(IO_S * 1e9))} if number == 0 else {}
        carry_out([*first, *(Write(NULL_BLK / f"mf{number}" / name, value) for name, value in slow.items()), power])
    tree = KernelConfigFs()
    target = NvmetTarget(tree, Export(PREFIX), patience_s=0.5)
    seen: dict[str, object] = {}
    report = target.desire(desired(Host(host("one")), Host(host("two"))))
    seen["created"] = (report.converged, report.reasons, target.reconcile().applied)
    report = target.desire(desired(Host(host("one")), Host(host("two")), state=AnaState.NON_OPTIMIZED))
    seen["changed"] = (report.converged, report.applied)
    report = target.desire(desired(Host(host("one")), Host(host("two"))))
    seen["changed back"] = (report.converged, report.reasons)
    seen["connected"] = connect(host("one"))
    seen["stranger"] = connect(host("other"), host("one"))
    (first_device, _) = block_devices(host_subsystem_nqn(PREFIX, host("one")), 2)
    seen |= fence_while_writing(target, first_device)
    seen["readmitted"] = connect(host("one"), host("one")) == ""
    report = target.desire(desired(Host(host("two")), port=4421))
    seen["moved"] = (report.converged, report.reasons, sorted(tree.entries("ports")), len(read_actual(tree)))
    key = Path("/tmp/key")
    key.write_text(KEY)
    report = target.desire(desired(Host(host("three"), HostKey(key, key_id(KEY)))))
    seen["keyed"] = (report.converged, report.reasons, connect(host("three")) != "")
    attribute = NVMET / "hosts" / host("three") / "dhchap_key"
    modes = [attribute.stat().st_mode & 0o777]
    key.write_text(OTHER_KEY)
    report = target.desire(desired(Host(host("three"), HostKey(key, key_id(OTHER_KEY)))))
    modes.append(attribute.stat().st_mode & 0o777)
    seen["another key"] = (report.converged, report.applied, attribute.read_text().strip() == OTHER_KEY, modes)
    seen["read by others"] = [read_as_nobody(path) for path in (attribute, attribute.with_name("dhchap_hash"))]
    report = target.desire(Export(PREFIX))
    seen["gone"] = (report.converged, [sorted(tree.entries(name)) for name in ("subsystems", "ports", "hosts")])
    seen["left"] = []
    return seen


def read_as_nobody(path: Path) -> str:
    """What somebody else of this machine reads; empty: nothing."""
    done = subprocess.run(["cat", path], user=65534, group=65534, extra_groups=(), capture_output=True, text=True)
    return done.stdout


def fence_while_writing(target: NvmetTarget, device: Path) -> dict[str, object]:
    ended_s: list[float] = []
    writer = threading.Thread(target=write_block, args=(device, ended_s))
    began_s = time.monotonic()
    writer.start()
    time.sleep(IO_S / 4)
    asked, verdict = 0, target.fence(host("one"))
    first = verdict
    while verdict != Confirmed() and time.monotonic() < began_s + 60.0:
        asked += 1
        verdict = target.fence(host("one"))
    confirmed_s = time.monotonic() - began_s
    writer.join(20.0)
    return {
        "first verdict": str(first),
        "confirmed": verdict == Confirmed(),
        "confirmed_s": confirmed_s,
        "asked": asked,
        "write_s": [abs(at_s) - began_s for at_s in ended_s],
        "written": [at_s > 0 for at_s in ended_s],
    }


if __name__ == "__main__":
    print(json.dumps(main()))
