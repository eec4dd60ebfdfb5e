"""How far a card is from serving, seen from its host: states to tell apart, and what to do about each. No I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.image.install_log import InstallLog, Milestone


class Readiness(enum.Enum):
    READY = "ready"
    SILENT = "silent"
    INSTALLING = "installer running"
    UEFI_ONLY = "UEFI only"
    TMFIFO_DOWN = "Linux up, tmfifo down"
    SSH_DOWN = "tmfifo up, ssh down"
    PORTS_UNBOUND = "Arm fine, host ports unbound"
    VERSION_MISMATCH = "host and card versions differ"

    @property
    def next_step(self) -> str:
        return _NEXT_STEPS[self]


_NEXT_STEPS: Final = {
    Readiness.READY: "Nothing: start or resume the service on it.",
    Readiness.SILENT: "Nothing was heard of the card's boot. Look at its power and its console (screen "
    "/dev/rshimN/console); if nothing is installed there, flash it with `--reset-installing`.",
    Readiness.INSTALLING: "Wait: run the same command again, which looks on and does not reset the card. Do not reset "
    "it or its host meanwhile.",
    Readiness.UEFI_ONLY: "Its firmware found no system to boot. Look at its console (screen /dev/rshimN/console) for "
    "the boot entry that it tries; then flash it again.",
    Readiness.TMFIFO_DOWN: "Give the host's tmfifo_netN the address 192.168.100.1/30 and bring it up: `ip addr add "
    "192.168.100.1/30 dev tmfifo_net0 && ip link set tmfifo_net0 up`. Look for 192.168.100.2 on the card.",
    Readiness.SSH_DOWN: "Log in over its console (screen /dev/rshimN/console) and look at: systemctl status ssh. Until "
    "the card says that it is ready, logins are refused.",
    Readiness.PORTS_UNBOUND: "Bind them on the host: `modprobe mlx5_core`, or `echo PCI_ADDRESS > "
    "/sys/bus/pci/drivers/mlx5_core/bind`; where they are missing, restart the host.",
    Readiness.VERSION_MISMATCH: "Switch the host off and on again (a restart is not enough), so that the new NIC "
    "firmware is loaded.",
}


@dataclass(frozen=True, slots=True)
class Observation:
    """What can be seen from the host. None: it cannot be seen from here.

    ``ssh_banner``: what port 22 of the card says first, "" for nothing. ``address_is_own``: the host itself has the
    address that should be the card's, so that whatever answers there is the host.
    """

    tmfifo_is_up: bool | None = None
    address_is_own: bool = False
    ssh_banner: str | None = None
    unbound_ports: tuple[str, ...] | None = None
    firmware_version: str | None = None
    wanted_firmware_version: str | None = None

    @property
    def is_linux_up(self) -> bool:
        """Something that is not the host answers at the card's address."""
        return (self.ssh_banner or "").startswith("SSH-") and not self.address_is_own


@dataclass(frozen=True, slots=True)
class Standing:
    """``detail``: what told, in words; ``unseen``: what could not be looked at."""

    readiness: Readiness
    detail: str
    unseen: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.readiness is Readiness.READY


def standing_of(log: InstallLog, seen: Observation) -> Standing:
    """The first thing that is missing, in the order in which a card comes up. ``log``: of this boot or the flash."""
    before_linux = _before_linux(log, seen)
    if before_linux is not None:
        return before_linux
    if seen.address_is_own:
        return Standing(Readiness.TMFIFO_DOWN, "the host has the card's address itself")
    if seen.tmfifo_is_up is False:
        return Standing(Readiness.TMFIFO_DOWN, "the host's end of tmfifo is missing or has no carrier")
    if seen.ssh_banner is not None and not seen.ssh_banner.startswith("SSH-"):
        detail = f"port 22 says {seen.ssh_banner[:40]!r}" if seen.ssh_banner else "port 22 of the card does not answer"
        return Standing(Readiness.SSH_DOWN, detail)
    if seen.unbound_ports:
        return Standing(Readiness.PORTS_UNBOUND, f"without the driver mlx5_core: {', '.join(seen.unbound_ports)}")
    if log.wants_power_cycle:
        return Standing(Readiness.VERSION_MISMATCH, "the installer asks for a power cycle of the host")
    wanted, runs = seen.wanted_firmware_version, seen.firmware_version
    if wanted is not None and runs is not None and wanted != runs:
        return Standing(Readiness.VERSION_MISMATCH, f"NIC firmware {runs} runs, the image brings {wanted}")
    return Standing(Readiness.READY, "", _unseen(seen))


def _before_linux(log: InstallLog, seen: Observation) -> Standing | None:
    is_up = bool({Milestone.LINUX_UP, Milestone.READY} & log.passed)
    if is_up or (not log.passed and seen.is_linux_up):
        return None  # a log that another reader emptied tells nothing; what answers does
    if log.furthest is None:
        return Standing(Readiness.SILENT, "its log is empty, and nothing answers at its address")
    if log.furthest is Milestone.REBOOTING or log.furthest <= Milestone.UEFI:
        return Standing(Readiness.UEFI_ONLY, f"last heard: {log.furthest.label}")
    return Standing(Readiness.INSTALLING, f"last heard: {log.furthest.label}")


def _unseen(seen: Observation) -> tuple[str, ...]:
    looked_at = {
        "tmfifo": seen.tmfifo_is_up,
        "ssh": seen.ssh_banner,
        "host ports": seen.unbound_ports,
        "NIC firmware": seen.firmware_version,
    }
    return tuple(name for name, value in looked_at.items() if value is None)
