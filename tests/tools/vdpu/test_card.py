"""A virtual card whose machine is a shell script: what it is booted from, what is said, and that nothing is left."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshfusion.dpu.image.install_log import Milestone, milestone_of
from meshfusion.dpu.image.misc import parse_misc
from meshfusion.tools.vdpu.card import VirtualCard
from meshfusion.tools.vdpu.hardware import DriveBoot, Hardware, RshimBoot
from meshfusion.tools.vdpu.rshim_view import RshimView
from tests.tools.vdpu.test_stream_parts import BF_CFG, BFB

INSTALLER = """
for line in "Found bf.cfg" "Debian installation started" "Installation finished" "Rebooting..."; do
    echo " INFO[MISC]: $line" >> rshim.log
done
grep -q device initrd.seen && touch installed
"""
SYSTEM = """
if [ -e installed ]; then
    echo 'BdsDxe: starting Boot0001 "UEFI QEMU NVMe Ctrl BOOT0 1" from Pci' >> console.log
    echo " INFO[MISC]: Linux up" >> rshim.log
else
    echo 'BdsDxe: starting Boot0002 "EFI Internal Shell" from Fv' >> console.log
fi
echo $$ >> machines
exec sleep 600
"""


@dataclass(frozen=True, slots=True)
class ScriptedHardware(Hardware):
    """``installer``: what the machine does that is booted from a stream."""

    installer: str = INSTALLER

    def argv(self, boot: RshimBoot | DriveBoot) -> tuple[str, ...]:
        script = SYSTEM
        if isinstance(boot, RshimBoot):
            script = f"cp {boot.initrd} initrd.seen\n{self.installer}"
        return ("sh", "-c", f"cd {self.folder}\n{script}")


@contextmanager
def living(folder: Path, installer: str = INSTALLER) -> Iterator[VirtualCard]:
    hardware = ScriptedHardware(folder, installer=installer)
    card = VirtualCard(hardware, RshimView("usb-1-1", "BlueField-3(Rev 1)", display_level=2))
    thread = threading.Thread(target=card.live)
    thread.start()
    try:
        yield card
    finally:
        card.end()
        thread.join(20)
        assert not thread.is_alive()
    for pid in (folder / "machines").read_text().split() if (folder / "machines").exists() else ():
        assert not Path(f"/proc/{pid}").exists(), "a machine is left"


def milestones(card: VirtualCard) -> set[Milestone]:
    return {found for line in parse_misc(card.read_misc()).log if (found := milestone_of(line)) is not None}


def until(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def push(card: VirtualCard, data: bytes) -> None:
    card.open_boot()
    for start in range(0, len(data), 64):
        assert card.write_boot(data[start : start + 64]) == len(data[start : start + 64])
    card.close_boot()


def test_with_nothing_on_its_drive_it_gets_as_far_as_its_firmware(tmp_path: Path) -> None:
    with living(tmp_path) as card:
        until(lambda: (tmp_path / "machines").exists())
        time.sleep(0.5)
        assert max(milestones(card)) is Milestone.FIRMWARE


def test_what_was_pushed_installs_and_then_the_drive_boots(tmp_path: Path) -> None:
    with living(tmp_path) as card:
        push(card, BFB + BF_CFG)
        until(lambda: Milestone.LINUX_UP in milestones(card))
        assert {Milestone.BF_CFG_FOUND, Milestone.INSTALLATION_FINISHED, Milestone.REBOOTING} <= milestones(card)
        assert (tmp_path / "installed").exists(), "bf.cfg was in the initramfs"


def test_a_push_that_is_cut_short_boots_nothing(tmp_path: Path) -> None:
    with living(tmp_path) as card:
        push(card, BFB[:-1])
        time.sleep(0.5)
        assert parse_misc(card.read_misc()).log == (" INFO[BL2]: start", " INFO[BL2]: boot mode (rshim)")
        assert not (tmp_path / "initrd.seen").exists()
        push(card, BFB + BF_CFG)
        until(lambda: Milestone.LINUX_UP in milestones(card))


def test_a_stream_that_is_damaged_is_an_error_in_its_log(tmp_path: Path) -> None:
    damaged = bytearray(BFB)
    damaged[-9] ^= 1
    with living(tmp_path) as card:
        push(card, bytes(damaged) + BF_CFG)
        assert "ERR[BL2]" in parse_misc(card.read_misc()).log[-1]


def test_opening_boot_resets_it_and_a_second_one_is_busy(tmp_path: Path) -> None:
    with living(tmp_path) as card:
        push(card, BFB + BF_CFG)
        until(lambda: Milestone.LINUX_UP in milestones(card))
        running = (tmp_path / "machines").read_text().split()[-1]
        card.open_boot()
        until(lambda: not Path(f"/proc/{running}").exists())
        assert Milestone.LINUX_UP not in milestones(card)
        with pytest.raises(OSError, match="busy") as raised:
            card.open_boot()
        assert raised.value.errno == errno.EBUSY
        card.close_boot()


def test_a_reset_boots_the_drive_again(tmp_path: Path) -> None:
    (tmp_path / "installed").touch()
    with living(tmp_path) as card:
        until(lambda: Milestone.LINUX_UP in milestones(card))
        card.write_misc(b"SW_RESET 1\n")
        assert Milestone.LINUX_UP not in milestones(card)
        until(lambda: Milestone.LINUX_UP in milestones(card))
        until(lambda: len((tmp_path / "machines").read_text().split()) == 2)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    with living(tmp_path) as card, pytest.raises(OSError, match="unknown key"):
        card.write_misc(b"NO_SUCH_KEY 1\n")
