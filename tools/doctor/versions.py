"""Versions that matter to somebody who is asked for help: rdma-core, drivers, firmware, the DPU's system."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from meshfusion.tools.doctor.machine import Machine
from meshfusion.tools.mfctl.findings import Finding, State

_LIBRARY_FOLDERS: Final = ("usr/lib", "usr/lib64", "lib64")
_VERBS: Final = re.compile(r"libibverbs\.so\.1\.\d+\.(\d+\.\d+)")
_DRIVERS: Final = ("mlx5_core", "nvidia", "irdma", "bnxt_en")


def check_versions(machine: Machine) -> Iterator[Finding]:
    core = rdma_core(machine)
    if core is None:
        remedy = "apt install rdma-core libibverbs1"
        yield Finding("rdma-core", State.INFO, "not found: no RDMA path; local pools do not need it", remedy)
    else:
        yield Finding("rdma-core", State.INFO, core)
    drivers = {name: machine.text(f"sys/module/{name}/version") for name in _DRIVERS}
    told = [f"{name} {version}" for name, version in drivers.items() if version]
    told += [f"{name} of the kernel" for name, version in drivers.items() if not version and _loaded(machine, name)]
    if told:
        yield Finding("drivers", State.INFO, ", ".join(told))
    drives = Counter(filter(None, (_drive(machine, name) for name in machine.names("sys/class/nvme"))))
    if drives:
        yield Finding("drive firmware", State.INFO, ", ".join(f"{count} of {name}" for name, count in drives.items()))
    release = machine.text("etc/mlnx-release")
    if release:
        yield Finding("dpu system", State.INFO, release.splitlines()[0])


def _drive(machine: Machine, name: str) -> str:
    """Of a drive, not of a controller that lies behind a fabric."""
    if machine.text(f"sys/class/nvme/{name}/transport") not in (None, "pcie"):
        return ""
    model, firmware = (machine.text(f"sys/class/nvme/{name}/{key}") for key in ("model", "firmware_rev"))
    return f"{model} with {firmware}" if model and firmware else ""


def _loaded(machine: Machine, module: str) -> bool:
    return machine.has(f"sys/module/{module}")


def rdma_core(machine: Machine) -> str | None:
    """By the name of its library: ``libibverbs.so.1.14.50.0`` is of rdma-core 50.0."""
    for folder in _LIBRARY_FOLDERS:
        below = [folder, *(f"{folder}/{name}" for name in machine.names(folder) if name.endswith("-linux-gnu"))]
        for place in below:
            for name in machine.names(place):
                found = _VERBS.fullmatch(name)
                if found is not None:
                    return found[1]
    return None
