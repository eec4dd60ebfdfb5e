"""Drives of a server: found in sysfs, read through the driver."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from meshfusion.jbof.drives.domain import DomainMap, FailureDomain, Location
from meshfusion.jbof.drives.drive import Drive, DriveKind, Found, Passed, without_twins
from meshfusion.jbof.drives.pages import PageReader, read_drive
from meshfusion.jbof.drives.reading import drive_of
from meshfusion.jbof.drives.system.enclosure import slot_of
from meshfusion.jbof.drives.system.nvme_pages import opened_controller
from meshfusion.jbof.drives.system.sysfs import BlockNamespace, Controller, nvme_namespaces
from meshfusion.jbof.errors import MeshFusionError

OpenController = Callable[[Path], contextlib.AbstractContextManager[PageReader]]

_LOCAL = "pcie"


class ServerDrives:
    """A :class:`~meshfusion.jbof.drives.drive.DriveSource`. ``root``: ``/sys``; ``devices``: ``/dev``.

    Only drives on this machine's own bus: a namespace that is attached over a fabric belongs to its target.
    """

    def __init__(
        self,
        domains: DomainMap | None = None,
        *,
        root: Path = Path("/sys"),
        devices: Path = Path("/dev"),
        open_controller: OpenController = opened_controller,
        node: str | None = None,
    ) -> None:
        """``node``: this machine's name, the default of ``dpu`` and ``enclosure``."""
        self._domains = domains or DomainMap()
        self._root, self._devices = root, devices
        self._open = open_controller
        self._node = socket.gethostname() if node is None else node

    def discover(self) -> Found:
        drives, passed = [], []
        for namespace in nvme_namespaces(self._root):
            controller = namespace.live
            where = str(self._devices / namespace.name)
            if controller is None:
                passed.append(Passed(where, "no controller of it is live", "Look at the kernel's log; plug it anew."))
            elif controller.transport != _LOCAL:
                reason = (
                    f"it is attached over {controller.transport or 'an unknown transport'}, not on this machine's bus"
                )
                passed.append(Passed(where, reason, "Let the service at its target own it."))
            else:
                try:
                    drives.append(self._drive(namespace, controller, where))
                except MeshFusionError as error:
                    passed.append(Passed(where, error.message, error.next_step))
        found = without_twins(drives)
        return Found(found.drives, (*passed, *found.passed))

    def _drive(self, namespace: BlockNamespace, controller: Controller, where: str) -> Drive:
        with self._open(self._devices / controller.name) as pages:
            reading = read_drive(pages, namespace.nsid)
        slot = slot_of(self._root, controller.address)
        domain = FailureDomain(
            drive=reading.identity.serial or reading.identity.unique,
            port=controller.port or controller.address,
            dpu=self._node,
            enclosure=slot.enclosure or self._node,
        )
        location = Location(slot.name, controller.address, controller.transport)
        return drive_of(reading, DriveKind.NVME, where, location, domain, self._domains, namespace.users)
