"""The kernel: its version, its modules, huge pages, locked memory, and whether the IOMMU is in the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshfusion.tools.doctor.machine import Machine, UnseenError
from meshfusion.tools.doctor.needs import Needs
from meshfusion.tools.doctor.pci import gpus, rdma_devices
from meshfusion.tools.doctor.role import Role
from meshfusion.tools.mfctl.findings import Finding, State
from meshfusion.tools.mfctl.output import format_bytes

_RELEASE: Final = "proc/sys/kernel/osrelease"
DMA_BUF_SINCE: Final = (5, 12)
"""From then on RDMA devices take memory of others as a dma-buf (ibv_reg_dmabuf_mr)."""
RESERVATIONS_SINCE: Final = (6, 13)
"""From then on the kernel's target has reservations, resv_enable: docs/drives.md."""


@dataclass(frozen=True, slots=True)
class Module:
    """``needed_for``: what does not work without it."""

    name: str
    needed_for: str


_RDMA_MODULES: Final = (
    Module("ib_uverbs", "RDMA from user space"),
    Module("rdma_ucm", "connections of the RDMA path"),
)
_HOST_MODULES: Final = (
    *_RDMA_MODULES,
    Module("nvme_rdma", "namespaces as block devices over RDMA"),
    Module("nvme_tcp", "namespaces as block devices over TCP"),
)
_EXPORT_MODULES: Final = (
    *_RDMA_MODULES,
    Module("nvme", "NVMe drives"),
    Module("nvmet", "exports.target: nvmet"),
    Module("nvmet_rdma", "exports.target: nvmet over RDMA"),
    Module("nvmet_tcp", "exports.target: nvmet over TCP"),
    Module("dm_crypt", "encryption of a pool's drives"),
    Module("vfio_pci", "drives that SPDK drives itself"),
)


def check_kernel(machine: Machine, role: Role) -> Iterator[Finding]:
    release = machine.text(_RELEASE)
    if release is None:
        raise UnseenError(f"/{_RELEASE} is not there", "Run it where /proc is mounted.")
    version = kernel_version(release)
    if version is None:
        yield Finding("kernel", State.UNSEEN, f"Linux {release}: its version cannot be told", "uname -r")
    elif role is Role.HOST and version < DMA_BUF_SINCE:
        yield Finding(
            "kernel",
            State.WARN,
            f"Linux {release}: RDMA devices take no dma-buf before 5.12",
            "Use a newer kernel, or nvidia-peermem.",
        )
    elif role.exports and version < RESERVATIONS_SINCE:
        remedy = (
            "None is needed with SPDK; with the kernel's target use Linux 6.13 or newer where two services share it."
        )
        yield Finding("kernel", State.INFO, f"Linux {release}: its target has no reservations before 6.13", remedy)
    else:
        yield Finding("kernel", State.OK, f"Linux {release}")


def kernel_version(release: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", release)
    return None if found is None else (int(found[1]), int(found[2]))


def check_modules(machine: Machine, role: Role, needs: Needs) -> Iterator[Finding]:
    """What is needed is a warning when it cannot be had; else it is only said."""
    machine.need("proc/modules", "the kernel's modules")
    loaded = {line.split()[0] for line in machine.lines("proc/modules")}
    release = machine.text(_RELEASE) or ""
    built_in, loadable = (_listed(machine, release, name) for name in ("modules.builtin", "modules.dep"))
    for module in _HOST_MODULES if role is Role.HOST else _EXPORT_MODULES:
        check, wanted = f"module {module.name}", module.name in needs.modules
        if module.name in loaded or module.name in (built_in or ()) or machine.has(f"sys/module/{module.name}"):
            yield Finding(check, State.OK, f"there, for {module.needed_for}")
        elif loadable is None:
            cause = f"not loaded, and /lib/modules/{release} is not shown; for {module.needed_for}"
            yield Finding(check, State.UNSEEN, cause, f"On the host: modprobe {module.name}")
        elif module.name in loadable:
            state = State.WARN if wanted else State.INFO
            remedy = f"modprobe {module.name}; and its name into /etc/modules-load.d/meshfusion.conf"
            yield Finding(check, state, f"not loaded, for {module.needed_for}", remedy)
        else:
            state = State.WARN if wanted else State.INFO
            remedy = f"Install the kernel's package that has it (Ubuntu: linux-modules-extra-{release})."
            yield Finding(check, state, f"not part of this kernel, for {module.needed_for}", remedy)


def _listed(machine: Machine, release: str, name: str) -> frozenset[str] | None:
    """Names of modules, as ``/proc/modules`` writes them; None where the list is not shown."""
    places = (f"lib/modules/{release}/{name}", f"usr/lib/modules/{release}/{name}")
    place = next(filter(machine.has, places), None)
    if place is None:
        return None
    paths = (line.partition(":")[0] for line in machine.lines(place))
    return frozenset(path.rpartition("/")[2].partition(".ko")[0].replace("-", "_") for path in paths)


def check_hugepages(machine: Machine, role: Role, needs: Needs) -> Iterator[Finding]:
    """For SPDK's nvmf_tgt alone. Of each size that the machine has, whichever is mounted."""
    if not role.exports and not needs.hugepages_bytes:
        return
    machine.need("sys/kernel/mm", "huge pages")
    sizes = [name for name in machine.names("sys/kernel/mm/hugepages") if re.fullmatch(r"hugepages-\d+kB", name)]
    pages = {
        int(name.removeprefix("hugepages-")[:-2]) << 10: machine.number(f"sys/kernel/mm/hugepages/{name}/nr_hugepages")
        for name in sizes
    }
    total_bytes = sum(size * (count or 0) for size, count in pages.items())
    told = ", ".join(f"{count or 0} of {format_bytes(size)}" for size, count in pages.items()) or "none of any size"
    if total_bytes < needs.hugepages_bytes:
        missing = needs.hugepages_bytes - total_bytes
        cause = f"{told}; exports.spdk.memory is {format_bytes(needs.hugepages_bytes)}, {format_bytes(missing)} more"
        yield Finding(
            "hugepages", State.WARN, cause, f"sysctl vm.nr_hugepages={-(-needs.hugepages_bytes // (2 << 20))}"
        )
    elif not total_bytes:
        remedy = "With SPDK: sysctl vm.nr_hugepages=N, in the kernel's arguments to be sure of them."
        yield Finding("hugepages", State.INFO, f"{told}; the kernel's target needs none", remedy)
    else:
        yield Finding("hugepages", State.OK, told)


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """What RDMA registers is locked. The limit is that of this process, as a shell's; a unit has its own."""
    if not machine.names("sys/class/infiniband"):
        return
    line = next((line for line in machine.lines("proc/self/limits") if line.startswith("Max locked memory")), None)
    if line is None:
        raise UnseenError("/proc/self/limits does not tell the limit of locked memory", "ulimit -l")
    limit = line.removeprefix("Max locked memory").split()[0]
    if limit == "unlimited":
        yield Finding("locked memory", State.OK, "unlimited for this process")
    else:
        told = format_bytes(int(limit)) if limit.isdecimal() else limit
        remedy = "LimitMEMLOCK=infinity in the engine's unit, or memlock in /etc/security/limits.d."
        yield Finding("locked memory", State.WARN, f"{told} for this process: RDMA registers all KV memory", remedy)


def check_iommu(machine: Machine) -> Iterator[Finding]:
    """Where it translates, what an RDMA device sends to a GPU goes up to the root complex, and back."""
    if not gpus(machine):
        return
    kinds = {nic.name: machine.text(f"{nic.folder}/iommu_group/type") for nic in rdma_devices(machine)}
    translated = [name for name, kind in kinds.items() if kind is not None and kind.startswith("DMA")]
    if translated:
        cause = f"translates for {', '.join(translated)}: their way to a GPU is longer, and may not work"
        yield Finding("iommu", State.WARN, cause, "Add iommu=pt to the kernel's arguments (intel_iommu=on iommu=pt).")
    elif any(kinds.values()):
        yield Finding("iommu", State.OK, "passes RDMA devices through")
    elif kinds:
        yield Finding("iommu", State.OK, "off, as far as RDMA devices are concerned")
