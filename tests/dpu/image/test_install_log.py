"""What a card's log tells, from recordings of real cards and from the texts in the installers."""

from __future__ import annotations

import pytest

from meshfusion.dpu.image.install_log import InstallLog, Milestone, Verdict, is_installing, new_lines, verdict_of
from meshfusion.dpu.image.misc import parse_misc
from meshfusion.dpu.image.readiness import Observation, Readiness, standing_of
from tests.dpu.image.fake_card import INSTALLATION, LOGS, NEW_SYSTEM

M = Milestone


def test_a_recorded_installation_passes_each_milestone_without_a_failure() -> None:
    log = InstallLog().after(INSTALLATION)
    assert log.passed == set(M) - {M.LINUX_UP, M.READY}
    assert (log.fatal, log.partial, log.wants_power_cycle) == ((), (), False)
    assert InstallLog().after(INSTALLATION).after(NEW_SYSTEM).furthest is M.READY


def test_a_recorded_misc_is_read() -> None:
    misc = parse_misc((LOGS / "misc_bf3.txt").read_text())
    assert (misc.chip_family, misc.mode, misc.part_number) == ("BlueField-3", "DPU mode", "")
    assert (misc.pci_device, misc.display_level) == ("0000:53:00", 2)
    assert (misc.is_dropped, misc.is_locked) == (False, False)
    assert misc.log == NEW_SYSTEM


@pytest.mark.parametrize(
    ("text", "mode", "device"),
    [
        ("BF_MODE         NIC mode\nDEV_NAME        pcie-04:00.2\n", "NIC mode", "0000:04:00"),
        ("DEV_NAME        usb-1.1\nDEV_INFO        BlueField-2(Rev 1)\n", "", ""),
        ("DEV_NAME        pcie-lf-0001:AB:00.2\n", "", "0001:ab:00"),
        ("garbage\n\0\n", "", ""),
    ],
)
def test_misc_of_other_cards(text: str, mode: str, device: str) -> None:
    misc = parse_misc(text)
    assert (misc.mode, misc.pci_device) == (mode, device)


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (" ERR[MISC]: Installation failed", Verdict.FATAL),
        (" INFO[MISC]: Invalid bf.cfg", Verdict.FATAL),
        (" CRITICAL ERROR: Could not install", Verdict.FATAL),
        (" PANIC(BL31): PC = 0x1234", Verdict.FATAL),
        (" Exception(BL2): syndrome = 0x96000000(Data Abort)", Verdict.FATAL),
        (" ASSERT[BL2]: plat/foo.c", Verdict.FATAL),
        (" INFO[MISC]: Skip DPU OS installation", Verdict.FATAL),
        (" ERR[MISC]: NIC firmware update failed", Verdict.PARTIAL),
        (" WARN[MISC]: NIC Firmware files were not found", Verdict.PARTIAL),
        (" ERR[MISC]: Failed to add jammy0 boot entry. Retrying...", Verdict.FINE),
        (" ERR[MISC]: Failed to add jammy0 boot entry.", Verdict.PARTIAL),
        (" ERR[UEFI]: anything new", Verdict.PARTIAL),
        (" INFO[MISC]: NIC firmware update done: 32.41.1000", Verdict.FINE),
        (" INFO[UEFI]: DPU-BMC RF credentials not found", Verdict.FINE),
    ],
)
def test_lines_that_tell_of_failures(line: str, verdict: Verdict) -> None:
    assert verdict_of(line) is verdict


def test_a_failure_stays_one_when_the_former_system_comes_up_and_is_ready() -> None:
    log = InstallLog().after((*INSTALLATION[:27], " ERR[MISC]: Installation failed", *NEW_SYSTEM))
    assert log.furthest is M.READY
    assert log.fatal == ("ERR[MISC]: Installation failed",)


def test_an_installation_without_bf_cfg_is_a_failure() -> None:
    """The installer then goes by defaults that erase a drive."""
    (line,) = InstallLog().after([line for line in INSTALLATION if "bf.cfg" not in line]).fatal
    assert "no bf.cfg was found" in line


@pytest.mark.parametrize(
    ("lines", "is_running"),
    [
        (INSTALLATION[:23], False),
        (INSTALLATION[:24], True),
        (INSTALLATION[:30], True),
        (INSTALLATION[:31], True),
        (INSTALLATION, False),
        ((*INSTALLATION[:26], " ERR[MISC]: Installation failed"), False),
        ((*INSTALLATION[:26], *NEW_SYSTEM[:3]), False),
        (NEW_SYSTEM, False),
        (INSTALLATION[28:29], True),
        ((), False),
    ],
)
def test_whether_an_installation_runs(lines: tuple[str, ...], is_running: bool) -> None:
    assert is_installing(lines) is is_running


@pytest.mark.parametrize(
    ("before", "now", "added"),
    [
        ((), ("a", "b"), ("a", "b")),
        (("a", "b"), ("a", "b", "c"), ("c",)),
        (("a", "b", "c"), ("b", "c", "d"), ("d",)),
        (("a", "b"), ("x",), ("x",)),
        (("a", "b"), (), ()),
        (("a", "b"), ("a", "b"), ()),
    ],
)
def test_what_a_second_read_adds(before: tuple[str, ...], now: tuple[str, ...], added: tuple[str, ...]) -> None:
    assert new_lines(before, now) == added


UP = Observation(tmfifo_is_up=True, ssh_banner="SSH-2.0-x", unbound_ports=(), firmware_version="32.41.1000")
IS_UP = InstallLog().after(NEW_SYSTEM)
POWER_CYCLE = " INFO[MISC]: NIC Firmware reset is not supported. Host power cycle is required"


@pytest.mark.parametrize(
    ("log", "seen", "readiness"),
    [
        (InstallLog(), Observation(ssh_banner=""), Readiness.SILENT),
        (InstallLog().after(INSTALLATION[:26]), UP, Readiness.INSTALLING),
        (InstallLog().after(NEW_SYSTEM[:15]), Observation(ssh_banner=""), Readiness.UEFI_ONLY),
        (IS_UP, Observation(tmfifo_is_up=False, ssh_banner=""), Readiness.TMFIFO_DOWN),
        (IS_UP, Observation(tmfifo_is_up=True, address_is_own=True, ssh_banner="SSH-2.0-x"), Readiness.TMFIFO_DOWN),
        (IS_UP, Observation(tmfifo_is_up=True, ssh_banner=""), Readiness.SSH_DOWN),
        (IS_UP, Observation(tmfifo_is_up=True, ssh_banner="HTTP/1.1 400"), Readiness.SSH_DOWN),
        (IS_UP, Observation(True, ssh_banner="SSH-2.0-x", unbound_ports=("0000:83:00.0",)), Readiness.PORTS_UNBOUND),
        (IS_UP.after([POWER_CYCLE]), UP, Readiness.VERSION_MISMATCH),
        (IS_UP, Observation(True, False, "SSH-2.0-x", (), "32.40", "32.41"), Readiness.VERSION_MISMATCH),
        (IS_UP, UP, Readiness.READY),
        (InstallLog(), UP, Readiness.READY),
    ],
)
def test_states_are_told_apart_with_what_to_do(log: InstallLog, seen: Observation, readiness: Readiness) -> None:
    standing = standing_of(log, seen)
    assert standing.readiness is readiness
    assert len(standing.readiness.next_step) > 20


def test_what_cannot_be_seen_is_named() -> None:
    assert standing_of(IS_UP, Observation()).unseen == ("tmfifo", "ssh", "host ports", "NIC firmware")
