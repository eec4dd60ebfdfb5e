"""From what is configured, local ports and target portals, to paths that can be opened."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshfusion.host.path.flexpath.link import CurrentKey, OnEvent, PathInitiator, PathSpec
from meshfusion.host.path.flexpath.locality import SYSFS, Distance, gpu_distance
from meshfusion.jbof.nvme.initiator import connect

logger = logging.getLogger("meshfusion.path")

# A path that is away for long is nothing to give up: the others work, and it is asked for again every few seconds.
LOSS_TIMEOUT_S: Final = 1e6
ROUTED: Final = "routed"
"""In place of a network interface: whichever the kernel routes by."""


@dataclass(frozen=True, slots=True)
class PathAddress:
    """One local port and one target portal. ``net_device`` is the port's network interface or RDMA device, and
    ``source_address`` what it is known by; the kernel's routes choose the port without it."""

    portal: str
    service: int
    net_device: str
    source_address: str | None = None

    @property
    def name(self) -> str:
        return f"{self.net_device} to {self.portal} port {self.service}"


def path_specs(
    addresses: Iterable[PathAddress],
    subsystem_nqn: str,
    host_nqn: str,
    host_id: uuid.UUID,
    *,
    key: CurrentKey | None = None,
    gpu_pci_address: str | None = None,
    sysfs: Path = SYSFS,
    **settings: Any,
) -> list[PathSpec]:
    """``key``: with which a path that is opened authenticates itself. ``gpu_pci_address``: whose memory is moved;
    without it all paths are equally near. ``settings``: more of
    :class:`~meshfusion.jbof.nvme.settings.ControllerSettings`, and of
    :func:`~meshfusion.jbof.nvme.initiator.connect`.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` for a device that is not there.
    """
    options = {"loss_timeout_s": LOSS_TIMEOUT_S, **settings}
    specs = []
    for address in addresses:
        weight = 1.0
        if gpu_pci_address is not None:
            is_routed = address.net_device == ROUTED
            distance = Distance.UNKNOWN if is_routed else gpu_distance(gpu_pci_address, address.net_device, sysfs=sysfs)
            logger.info("path %s: %s to the GPU at %s", address.name, distance.name, gpu_pci_address)
            weight = distance.weight
        specs.append(PathSpec(address.name, _Opener(address, subsystem_nqn, host_nqn, host_id, key, options), weight))
    return specs


@dataclass(frozen=True, slots=True)
class _Opener:
    address: PathAddress
    subsystem_nqn: str
    host_nqn: str
    host_id: uuid.UUID
    key: CurrentKey | None
    options: dict[str, Any]

    def __call__(self, on_event: OnEvent) -> PathInitiator:
        options = self.options if self.key is None else {**self.options, "host_key": self.key.secret}
        return connect(
            self.address.portal,
            self.address.service,
            self.subsystem_nqn,
            self.host_nqn,
            self.host_id,
            source_address=self.address.source_address,
            on_event=on_event,
            **options,
        )
