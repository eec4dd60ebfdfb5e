"""A guest under QEMU's own translation (TCG): slow, but it has PCI, and so drives that speak NVMe."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.machine import Boot, Kind, Launch
from meshfusion.tools.lab.progress import Note
from meshfusion.tools.lab.tcg_image import TcgImage, prepared_image

_QEMU: Final = "qemu-system-x86_64"

# Each was measured to shorten the start; none changes what the drivers under test do.
_KERNEL_ARGUMENTS: Final = (
    "console=ttyS0",
    "quiet",
    "panic=-1",
    "mitigations=off",
    "nokaslr",
    "tsc=reliable",
    "no_timer_check",
    "lpj=10000000",
    "random.trust_cpu=on",
    "net.ifnames=0",
    "cryptomgr.notests",
    "audit=0",
    "apparmor=0",
    "security=none",
    "rcupdate.rcu_expedited=1",
    "init_on_alloc=0",
    "kfence.sample_interval=0",
    "nowatchdog",
    "hardened_usercopy=off",
    "randomize_kstack_offset=off",
    "noautogroup",
)


@dataclass(frozen=True, slots=True)
class EmulatedDrive:
    """An NVMe drive of one namespace, empty at the start unless ``image`` names a file, which is kept.

    ``zone_mib``: 0 for an ordinary namespace, else it is a zoned one (NVM Express Zoned Namespace Command Set).
    """

    size_mib: int
    block_bytes: int = 4096
    zone_mib: int = 0
    image: Path | None = None

    def __post_init__(self) -> None:
        assert self.block_bytes in (512, 4096), "a block size that NVMe drives have"
        assert self.size_mib > 0, "size_mib"
        assert not self.zone_mib or self.size_mib % self.zone_mib == 0, "whole zones"


def tcg_image(cache: Path, note: Note) -> TcgImage:
    """The distribution's kernel, made ready for booting without a disk. Raises LabError."""
    if platform.machine() != "x86_64":
        raise LabError("the emulated machine is an x86-64 one, as its host must be", next_step="use such a machine")
    return prepared_image(cache, "amd64", note)


@dataclass(frozen=True, slots=True)
class TcgMachine:
    """``wire``: a socket that carries Ethernet frames, where another machine listens (``-netdev stream``); this one has
    a network interface at its end."""

    image: TcgImage
    drives: tuple[EmulatedDrive, ...] = ()
    wire: Path | None = None

    @property
    def kind(self) -> Kind:
        return "tcg"

    @property
    def settings(self) -> Mapping[str, str]:
        names = [*(("nvme",) if self.drives else ()), *(("virtio_net",) if self.wire else ())]
        drivers = {"LAB_DRIVERS": " ".join(names)} if names else {}
        return {"LAB_LINE": "/dev/vport0p1", "LAB_MODULES": str(self.image.modules), **drivers}

    def prepare(self, folder: Path) -> None:
        """Drives without an image of their own get one, sparse, in the boot folder."""
        for index, drive in enumerate(self.drives):
            path = _image_of(drive, index, folder)
            with path.open("ab") as image:
                image.truncate(max(drive.size_mib << 20, image.tell()))

    def launch(self, boot: Boot) -> Launch:
        """One processor: with two, every lock costs more than the second one gives (measured on two cores)."""
        appended = " ".join((*_KERNEL_ARGUMENTS, f"lab={boot.folder}"))
        argv = [
            shutil.which(_QEMU) or _QEMU,
            *("-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-monitor", "none", "-serial", "stdio"),
            *("-machine", "q35,hpet=off", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", "1"),
            *("-m", f"{boot.memory_mib}M"),
            *("-kernel", str(self.image.kernel), "-initrd", str(self.image.initrd), "-append", appended),
            *("-device", "virtio-serial", "-chardev", f"socket,id=line,fd={boot.line_fd}"),
            *("-device", "virtserialport,chardev=line,name=lab"),
            *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        ]
        if boot.output_directory is not None:
            shared = str(boot.output_directory).replace(",", ",,")
            argv += ["-virtfs", f"local,path={shared},mount_tag=out,security_model=none,multidevs=remap"]
        for index, drive in enumerate(self.drives):
            argv += drive_arguments(drive, index, _image_of(drive, index, boot.folder))
        if self.wire is not None:
            there = str(self.wire).replace(",", ",,")
            argv += ["-netdev", f"stream,id=wire,server=off,addr.type=unix,addr.path={there}"]
            argv += ["-device", "virtio-net-pci,netdev=wire,romfile="]
        return Launch(tuple(argv), {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": str(boot.folder)})


def drive_arguments(drive: EmulatedDrive, index: int, image: Path) -> list[str]:
    """A controller in a subsystem of its own with one namespace: zoned ones need a subsystem."""
    blocks = f"logical_block_size={drive.block_bytes},physical_block_size={drive.block_bytes}"
    zones = f",zoned=true,zoned.zone_size={drive.zone_mib}M,zoned.zone_capacity={drive.zone_mib}M"
    return [
        *("-drive", f"file={str(image).replace(',', ',,')},if=none,id=image{index},format=raw,discard=unmap"),
        *("-device", f"nvme-subsys,id=subsystem{index},nqn=subsystem{index}"),
        *("-device", f"nvme,id=drive{index},serial=LAB{index},subsys=subsystem{index}"),
        *(
            "-device",
            f"nvme-ns,bus=drive{index},nsid=1,drive=image{index},{blocks}" + (zones if drive.zone_mib else ""),
        ),
    ]


def _image_of(drive: EmulatedDrive, index: int, folder: Path) -> Path:
    return drive.image.absolute() if drive.image else folder / f"drive{index}.img"
