"""A card as a flash sees it: its rshim, and what its host or its BMC knows of it."""

from __future__ import annotations

import os
from typing import Final, Protocol

from meshfusion.dpu.image.edge.host_facts import SCRIPT, HostFacts, parse_facts
from meshfusion.dpu.image.edge.rshim import Rshim
from meshfusion.dpu.image.edge.shell import LocalShell, Shell
from meshfusion.dpu.image.host_network import isolation
from meshfusion.dpu.image.misc import Misc
from meshfusion.dpu.image.preflight import CardFacts
from meshfusion.dpu.image.readiness import Observation

TMFIFO_ADDRESS: Final = "192.168.100.2"
_SSH_PORT: Final = 22


class Card(Protocol):
    """Calls raise CardError. ``how_taken``, ``how_pushed``: for people."""

    how_taken: str
    how_pushed: str

    @property
    def rshim(self) -> Rshim: ...

    def facts(self) -> CardFacts:
        """What speaks for or against flashing it. Changes nothing."""

    def observe(self) -> Observation: ...
    def close(self) -> None: ...


class HostCard:
    """Reached from the host it is in. ``index``: N of its ``/dev/rshimN``. ``address``: of the card, over tmfifo."""

    def __init__(self, shell: Shell, rshim: Rshim, *, folder: str, index: int, address: str = TMFIFO_ADDRESS) -> None:
        self._shell, self.rshim = shell, rshim
        self._index, self._address = index, address
        self._pci_device = ""
        self.how_taken = f"use the rshim at {folder} of {shell.where}"
        self.how_pushed = f"write to {folder}/boot of {shell.where}"

    def facts(self) -> CardFacts:
        misc = self._look()
        host = self._host()
        return CardFacts(
            chip_family=misc.chip_family,
            mode=misc.mode,
            part_number=misc.part_number,
            psid=host.psid_of(self._pci_device),
            is_dropped=misc.is_dropped,
            is_locked=misc.is_locked,
            isolation=isolation(host.ports, self._pci_device) if self._pci_device else None,
        )

    def observe(self) -> Observation:
        if not self._pci_device:
            self._look()
        host = self._host()
        tmfifo = f"tmfifo_net{self._index}"
        is_own = self._address in host.addresses
        return Observation(
            tmfifo_is_up=tmfifo in host.carriers,
            address_is_own=is_own,
            ssh_banner="" if is_own else self._shell.banner(self._address, _SSH_PORT),
            unbound_ports=host.unbound_ports(self._pci_device),
            firmware_version=host.firmware_of(self._pci_device) or None,
        )

    def close(self) -> None:
        self.rshim.abandon_push()
        self._shell.close()

    def _look(self) -> Misc:
        self.rshim.take()
        misc = self.rshim.read_misc()
        self._pci_device = misc.pci_device
        return misc

    def _host(self) -> HostFacts:
        text = self._shell.run(SCRIPT, about="network and PCI devices").decode(errors="replace")
        session = os.environ.get("SSH_CONNECTION", "") if isinstance(self._shell, LocalShell) else ""
        return parse_facts(text, session)
