"""What a machine is to MeshFusion, and how that is guessed."""

from __future__ import annotations

import enum
from typing import Final

from meshfusion.tools.doctor.machine import Machine, UnseenError
from meshfusion.tools.doctor.pci import gpus, nvme_controllers
from meshfusion.tools.mfctl.findings import Finding, State

_DPU_PLACES: Final = (
    "sys/class/dmi/id/product_name",
    "sys/class/dmi/id/board_name",
    "proc/device-tree/model",
    "etc/mlnx-release",
)
_DPU_MARKS: Final = ("BlueField", "DOCA_2", "bf-bundle", "DOCA_BSP")


class Role(enum.Enum):
    HOST = "host"
    """Engines run here; perhaps the service too."""
    DPU = "dpu"
    """The card that exports the drives."""
    JBOF = "jbof"
    """A server of drives that exports them."""

    @property
    def exports(self) -> bool:
        return self is not Role.HOST


def role_finding(machine: Machine, wanted: Role | None) -> tuple[Role, Finding]:
    """``wanted``: as was said; None: as the machine looks."""
    if wanted is not None:
        return wanted, Finding("role", State.INFO, f"{wanted.value}, as was said")
    try:
        role, why = guess(machine)
    except UnseenError as error:
        role, why = Role.HOST, f"{error.cause}"
    remedy = "If it is something else: --role host, dpu or jbof."
    return role, Finding("role", State.INFO, f"looked at as {role.value}: {why}", remedy)


def guess(machine: Machine) -> tuple[Role, str]:
    """With the reason. Raises UnseenError."""
    for place in _DPU_PLACES:
        text = machine.text(place)
        if text is not None and any(mark in text for mark in _DPU_MARKS):
            return Role.DPU, f"/{place} says {text.splitlines()[0].rstrip(chr(0))}"
    found_gpus, drives = gpus(machine), nvme_controllers(machine)
    if found_gpus:
        return Role.HOST, f"it has {len(found_gpus)} GPUs" if len(found_gpus) > 1 else "it has a GPU"
    if len(drives) > 1 and machine.names("sys/class/infiniband"):
        return Role.JBOF, f"it has {len(drives)} NVMe drives, RDMA and no GPU"
    return Role.HOST, "it is no DPU, and no server of drives"
