"""The kernel's own initiator, as a peer to compare with: nvme-cli."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.guest_setup.nvmet import SERVICE
from meshfusion.tools.lab.guest_setup.steps import load_modules, output_of

APPEARS_DEADLINE_S: Final = 20.0
_SUBSYSTEMS: Final = Path("/sys/class/nvme-subsystem")


def connect(
    nqn: str,
    address: str,
    *,
    host_address: str | None = None,
    transport: str = "rdma",
    service: int = SERVICE,
    more: Sequence[str] = (),
) -> None:
    """``host_address``: the path's host end, see :mod:`.links`; ``more``: options of nvme-connect(1).

    Raises LabError.
    """
    load_modules(f"nvme-{transport}")
    bound = () if host_address is None else (f"--host-traddr={host_address}",)
    output_of(
        "nvme",
        "connect",
        f"--transport={transport}",
        f"--traddr={address}",
        f"--trsvcid={service}",
        f"--nqn={nqn}",
        *bound,
        *more,
    )


def disconnect(nqn: str) -> None:
    """All of its paths. Raises LabError."""
    output_of("nvme", "disconnect", f"--nqn={nqn}")


def disconnect_all() -> None:
    """Raises LabError."""
    output_of("nvme", "disconnect-all")


def block_devices(nqn: str, count: int, subsystems: Path = _SUBSYSTEMS) -> list[Path]:
    """The devices of a connected subsystem, by namespace. Waits until ``count`` are there. Raises LabError."""
    end = time.monotonic() + APPEARS_DEADLINE_S
    while time.monotonic() < end:
        names = sorted(
            entry.name
            for subsystem in subsystems.glob("*")
            if (subsystem / "subsysnqn").read_text().strip() == nqn
            for entry in subsystem.glob("nvme*n*")
            if "c" not in entry.name  # nvme0c1n1 is one path of nvme0n1
        )
        if len(names) >= count and all((Path("/dev") / name).exists() for name in names):
            return [Path("/dev") / name for name in names]
        time.sleep(0.02)
    raise LabError(
        f"{count} namespaces of {nqn} did not appear within {APPEARS_DEADLINE_S:.0f} s",
        next_step="see nvme list-subsys, and the end of the guest's kernel log: dmesg",
    )
