"""All that is looked at on a machine, in the order in which a reader wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from meshfusion.tools.doctor.certificates import check_context_files, check_service_files
from meshfusion.tools.doctor.clock import ClockState, check_clock, read_clock
from meshfusion.tools.doctor.kernel import (
    check_hugepages,
    check_iommu,
    check_kernel,
    check_locked_memory,
    check_modules,
)
from meshfusion.tools.doctor.listening import check_doors, doors_of
from meshfusion.tools.doctor.machine import Machine, seen
from meshfusion.tools.doctor.needs import needs_of
from meshfusion.tools.doctor.pci import check_links, check_locality
from meshfusion.tools.doctor.rdma import check_gpu_direct, check_rdma
from meshfusion.tools.doctor.role import Role
from meshfusion.tools.doctor.versions import check_versions
from meshfusion.tools.mfctl.findings import Finding

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServiceConfig
    from meshfusion.tools.mfctl.context_types import ServiceContext


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is looked at beside the machine. ``config``: of the service here; ``is_served``: it runs. ``context``: that
    of the user, whose files are looked at. ``now``: in UTC."""

    now: datetime
    config: ServiceConfig | None = None
    is_served: bool = False
    context: ServiceContext | None = None
    read_clock: Callable[[], ClockState | None] = field(default=read_clock)


def examine_machine(machine: Machine, role: Role, around: Surroundings) -> Iterator[Finding]:
    needs = needs_of(around.config)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("kernel", partial(check_kernel, machine, role)),
        ("modules", partial(check_modules, machine, role, needs)),
        ("hugepages", partial(check_hugepages, machine, role, needs)),
        ("rdma", partial(check_rdma, machine, role)),
        ("locked memory", partial(check_locked_memory, machine)),
        ("gpudirect", partial(check_gpu_direct, machine)),
        ("iommu", partial(check_iommu, machine)),
        ("pcie locality", partial(check_locality, machine)),
        ("pcie links", partial(check_links, machine)),
        ("clock", partial(check_clock, around.read_clock)),
        ("versions", partial(check_versions, machine)),
    ]
    if around.config is not None:
        doors = doors_of(around.config)
        checks.append(("ports", partial(check_doors, machine, doors, is_served=around.is_served)))
        checks.append(("certificates", partial(check_service_files, around.config, around.now)))
    if around.context is not None:
        checks.append(("context", partial(check_context_files, around.context, around.now)))
    for check, look in checks:
        yield from seen(check, look)
