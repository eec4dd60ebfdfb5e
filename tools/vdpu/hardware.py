"""A virtual card's machine as QEMU is started with it: processor, drives, ports, and what it boots from. No I/O."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.vdpu.system_files import PORT_MAC, TMFIFO_MAC

QEMU: Final = "qemu-system-aarch64"
FIRMWARE: Final = Path("/usr/share/AAVMF/AAVMF_CODE.fd")
FIRMWARE_VARIABLES: Final = Path("/usr/share/AAVMF/AAVMF_VARS.fd")
BOOT_SERIAL: Final = "BOOT0"
DRIVE_MODEL: Final = "QEMU_NVMe_Ctrl"

# Each shortens the start; none changes what the drivers under test do.
KERNEL_ARGUMENTS: Final = (
    "console=ttyAMA0", "quiet", "panic=-1", "mitigations=off", "cryptomgr.notests", "rcupdate.rcu_expedited=1",
    "init_on_alloc=0", "nowatchdog", "kfence.sample_interval=0", "audit=0", "security=none",
)  # fmt: skip


def drive_id(serial: str) -> str:
    """Name of the device on the card that does not change with the number of drives."""
    return f"/dev/disk/by-id/nvme-{DRIVE_MODEL}_{serial}"


def jbof_serial(index: int) -> str:
    return f"JBOF{index}"


@dataclass(frozen=True, slots=True)
class Hardware:
    """``folder``: holds the images of its drives. ``tmfifo``: the host's interface, a tap; "" for none."""

    folder: Path
    drives: int = 2
    memory_mib: int = 2048
    processors: int = 2
    tmfifo: str = ""

    @property
    def boot_image(self) -> Path:
        return self.folder / "boot.img"

    @property
    def variables(self) -> Path:
        return self.folder / "firmware.fd"

    @property
    def rshim_log(self) -> Path:
        return self.folder / "rshim.log"

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    @property
    def wire(self) -> Path:
        """A stream of Ethernet frames, to and from p0 (QEMU's ``-netdev stream``)."""
        return self.folder / "p0.sock"

    def jbof_image(self, index: int) -> Path:
        return self.folder / f"jbof{index}.img"

    def argv(self, boot: RshimBoot | DriveBoot) -> tuple[str, ...]:
        """It ends when the card restarts: what it boots from may be another then."""
        return (
            QEMU,
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"),
            *("-machine", "virt,gic-version=3", "-accel", "tcg,thread=multi", "-cpu", "neoverse-n1"),
            *("-smp", str(self.processors), "-m", f"{self.memory_mib}M"),
            *("-chardev", f"file,id=console,path={_plain(self.console)},append=on", "-serial", "chardev:console"),
            *("-device", "virtio-serial-pci"),
            *("-chardev", f"file,id=rshim,path={_plain(self.rshim_log)},append=on"),
            *("-device", "virtserialport,chardev=rshim,name=rshim.log"),
            *("-device", "virtio-rng-pci"),
            *boot.arguments(self),
            *self._drives(),
            *self._ports(),
        )

    def _drives(self) -> Iterator[str]:
        """The boot drive first: the last NVMe drive, which installers take when nobody says, is one of the JBOF's."""
        yield from _drive("boot", self.boot_image, BOOT_SERIAL, "cache=unsafe", ",bootindex=1")
        for index in range(self.drives):
            yield from _drive(f"jbof{index}", self.jbof_image(index), jbof_serial(index), "discard=unmap")

    def _ports(self) -> Iterator[str]:
        if self.tmfifo:
            yield from ("-netdev", f"tap,id=tmfifo,ifname={self.tmfifo},script=no,downscript=no")
            yield from ("-device", f"virtio-net-pci,netdev=tmfifo,mac={TMFIFO_MAC},romfile=")
        yield from ("-netdev", f"stream,id=p0,server=on,addr.type=unix,addr.path={_plain(self.wire)}")
        yield from ("-device", f"virtio-net-pci,netdev=p0,mac={PORT_MAC},romfile=")


@dataclass(frozen=True, slots=True)
class RshimBoot:
    """From what was pushed: kernel and initramfs."""

    kernel: Path
    initrd: Path

    def arguments(self, hardware: Hardware) -> tuple[str, ...]:
        appended = " ".join(KERNEL_ARGUMENTS)
        return ("-kernel", str(self.kernel), "-initrd", str(self.initrd), "-append", appended)


@dataclass(frozen=True, slots=True)
class DriveBoot:
    """From its boot drive, by UEFI."""

    def arguments(self, hardware: Hardware) -> tuple[str, ...]:
        return (
            *("-drive", f"if=pflash,format=raw,readonly=on,file={FIRMWARE}"),
            *("-drive", f"if=pflash,format=raw,file={_plain(hardware.variables)}"),
        )


def _drive(name: str, image: Path, serial: str, options: str, more: str = "") -> tuple[str, ...]:
    return (
        *("-drive", f"if=none,id={name},format=raw,file={_plain(image)},{options}"),
        *("-device", f"nvme,drive={name},serial={serial}{more}"),
    )


def _plain(path: Path) -> str:
    return os.fspath(path).replace(",", ",,")
