"""The host of fake cards: what its shell tells of network and PCI, as those cards stand."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field

from meshfusion.dpu.image.edge.host_facts import SCRIPT
from meshfusion.dpu.image.edge.shell import LocalShell
from tests.dpu.image.rshim_mount import Mounted

BANNER = "SSH-2.0-OpenSSH_8.9p1 Ubuntu-3"


def facts(*, up_for_s: float, default: str = "eno1", session: str = "", bus: str = "83") -> str:
    """A host with an onboard port and a card at this bus whose ports come back some seconds after its Linux."""
    driver = "mlx5_core" if up_for_s >= 6 else ""
    port = f"/sys/devices/pci0000:80/0000:80:01.0/0000:{bus}:00"
    return "\n".join((
        "net eno1 /sys/devices/pci0000:00/0000:00:1f.6",
        "carrier eno1",
        f"net ens7f0np0 {port}.0",
        f"net ens7f1np1 {port}.1",
        "net bond0 ", "lower bond0 ens7f0np0", "lower bond0 ens7f1np1",
        *(f"net tmfifo_net{n} " for n in range(3)),
        *(f"carrier tmfifo_net{n}" for n in range(3) if up_for_s >= 2),
        f"psid {port}.0 MT_0000000884",
        f"firmware {port}.0 32.41.1000",
        f"port 0000:{bus}:00.0 {driver}", f"port 0000:{bus}:00.1 {driver}", "port 0000:00:1f.6 e1000e",
        "addr 2: eno1    inet 10.0.0.5/24 brd 10.0.0.255 scope global eno1",
        "addr 9: bond0    inet 10.9.0.5/24 brd 10.9.0.255 scope global bond0",
        "addr 7: tmfifo_net0    inet 192.168.100.1/30 scope global tmfifo_net0",
        f"route default via 10.0.0.1 dev {default} proto dhcp metric 100",
        f"session {session}",
    ))  # fmt: skip


@dataclass
class FakeHost(LocalShell):
    """``cards``: whose readiness shows; the first counts. Scripts other than that of facts run as they are."""

    cards: list[Mounted]
    default: str = "eno1"
    bus: str = "83"
    where: str = "this host"
    scripts: list[str] = field(default_factory=list)

    def run(self, script: str, *, about: str, data: bytes = b"", timeout_s: float = 30.0) -> bytes:
        if script == SCRIPT:
            up_for_s = self.cards[0].state["up_for_s"]
            return facts(up_for_s=up_for_s, default=self.default, bus=self.bus).encode()
        self.scripts.append(script)
        return super().run(script, about=about, data=data, timeout_s=timeout_s)

    def start(self, script: str) -> subprocess.Popen[bytes]:
        self.scripts.append(script)
        return super().start(script)

    def banner(self, address: str, port: int) -> str:
        return BANNER if self.cards[0].state["up_for_s"] >= 4 else ""
