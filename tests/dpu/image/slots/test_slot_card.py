"""What is put onto a card, and what its refusals and failures mean."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshfusion.dpu.image.edge.faults import card_error_from_text
from meshfusion.dpu.image.edge.shell import LocalShell, SshShell
from meshfusion.dpu.image.edge.slot_card import SlotCard
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.slots.card_state import PROTOCOL, ServiceRuns
from meshfusion.dpu.image.slots.types import Blob
from tests.dpu.image.slots.card_rig import Card, make_programs
from tests.dpu.image.slots.script import SLOTCTL

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Card]:
    make_programs(tmp_path)
    with Card(tmp_path, "dpu-1", ROOT) as made:
        yield made


@pytest.fixture
def card(rig: Card, tmp_path: Path) -> Iterator[SlotCard]:
    made = SlotCard(SshShell("dpu-1", program=str(tmp_path / "bin/ssh")))
    yield made
    made.close()


def _files(rig: Card) -> dict[str, int]:
    """By path, with the inode, which a replaced file has anew."""
    found = [path for path in rig.folder.rglob("*") if path.is_file() and ("usr" in path.parts or "etc" in path.parts)]
    return {str(path.relative_to(rig.folder)): path.stat().st_ino for path in found if path.name != "service.yaml"}


def test_a_card_without_slots_gets_them(card: SlotCard, rig: Card) -> None:
    before = card.facts().state
    assert (before.committed, before.service, before.slots) == ("", ServiceRuns.STOPPED, {})
    assert before.free_bytes > 0
    assert _files(rig) == {}, "facts change nothing"
    card.install()
    first = _files(rig)
    assert set(first) == {
        "usr/lib/meshfusion/slotctl", "usr/lib/meshfusion/slot-runner", "usr/lib/meshfusion/slot-pod",
        "etc/systemd/system/meshfusion.service.d/slots.conf",
    }  # fmt: skip
    assert rig.slotctl.read_bytes() == SLOTCTL.read_bytes()
    assert rig.slotctl.stat().st_mode & 0o777 == 0o755
    card.install()
    assert _files(rig) == first, "what is there is left alone"
    rig.slotctl.write_text("#!/bin/sh\nPROTOCOL=0\n")
    card.install()
    assert rig.slotctl.read_bytes() == SLOTCTL.read_bytes()
    assert card.look().committed == ""


def test_a_card_whose_kubelet_runs_it_keeps_its_unit(card: SlotCard, rig: Card) -> None:
    unit = rig.folder / "etc/systemd/system/meshfusion.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/usr/lib/meshfusion/slot-pod up\n")
    card.install()
    assert "etc/systemd/system/meshfusion.service.d/slots.conf" not in _files(rig)


def test_a_later_slotctl_is_left_alone(card: SlotCard, rig: Card) -> None:
    later = f"#!/bin/sh\nPROTOCOL={PROTOCOL + 1}\necho protocol={PROTOCOL + 1}\n"
    rig.slotctl.write_text(later)
    rig.slotctl.chmod(0o755)
    for call in (card.install, card.look):
        with pytest.raises(CardError, match=f"version {PROTOCOL + 1}") as raised:
            call()
        assert raised.value.kind is FaultKind.REFUSED
        assert "later one" in raised.value.next_step
    assert rig.slotctl.read_text() == later


@dataclass
class _Failing(LocalShell):
    """Every script ends with this on its standard error."""

    says: str = ""
    where: str = "dpu-1"

    def run(self, script: str, *, about: str, data: bytes = b"", timeout_s: float = 30.0) -> bytes:
        raise card_error_from_text(self.says, f"{about} on {self.where}")

    def start(self, script: str) -> subprocess.Popen[bytes]:
        raise AssertionError


@pytest.mark.parametrize(
    ("says", "kind", "message"),
    [
        ("slotctl: busy: slot b is on trial", FaultKind.BUSY, "dpu-1: slot b is on trial"),
        ("slotctl: damaged: x arrived otherwise than it was sent", FaultKind.DAMAGED, "dpu-1: x arrived otherwise"),
        ("slotctl: the trial is over: t gone", FaultKind.REFUSED, "dpu-1: the trial is over: t gone"),
        ("cat: write error: No space left on device", FaultKind.BROKEN, "No space left on device"),
        ("sh: 1: /usr/lib/meshfusion/slotctl: not found", FaultKind.BROKEN, "slotctl: not found"),
        ("mv: cannot move: Permission denied", FaultKind.DENIED, "Permission denied"),
        ("tar: x: Cannot open: Device or resource busy", FaultKind.BROKEN, "Device or resource busy"),
    ],
)
def test_what_failures_mean(says: str, kind: FaultKind, message: str) -> None:
    with pytest.raises(CardError) as raised:
        SlotCard(_Failing(says)).commit("t-1")
    assert raised.value.kind is kind
    assert message in raised.value.message
    assert "rshim" not in raised.value.next_step
    with pytest.raises(CardError) as raised:
        SlotCard(_Failing(says)).install()
    assert "rshim" not in raised.value.next_step


def test_a_bundle_that_is_gone_meanwhile(tmp_path: Path) -> None:
    def read(blob: Blob, offset_bytes: int, length_bytes: int) -> bytes:
        return (tmp_path / "gone").read_bytes()

    with pytest.raises(CardError, match="gone: No such file or directory") as raised:
        SlotCard(LocalShell(), read).put(Blob("0" * 64, 5), 0, 5)
    assert raised.value.kind is FaultKind.BROKEN
