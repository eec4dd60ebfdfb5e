"""``mfctl jbof`` on a machine made of a tree like sysfs and pages, and on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.jbof.drives.system import server
from meshfusion.tools.mfctl import drive_sources
from meshfusion.tools.mfctl.main import mfctl
from tests.jbof.drives.sysfs_tree import add_ses_slot, write
from tests.jbof.drives.test_server import Rig


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["jbof", *arguments])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Two drives; the first has a slot with a light."""
    rig = Rig(tmp_path)
    add_ses_slot(rig.root, rig.add(0, "S1", "0000:00:03.0/0000:04:00.0"))
    rig.add(1, "S2", "0000:00:04.0/0000:05:00.0")
    rig.add(2, "S3", "0000:00:05.0/0000:06:00.0", transport="tcp")
    monkeypatch.setattr(drive_sources, "SYSFS", rig.root)
    original = server.ServerDrives

    def drives(*arguments: Any, **more: Any) -> server.ServerDrives:
        return original(*arguments, **more, open_controller=rig.open, node="node-a")

    monkeypatch.setattr(server, "ServerDrives", drives)
    return rig


def test_list(machine: Rig) -> None:
    result = run("list")
    assert result.exit_code == 0
    header, first, second = result.stdout.splitlines()
    assert header.split("  ")[0] == "DRIVE"
    assert "MONTHS LEFT" in header
    # The recorded log: 7 % used in 26280 hours, which is three years; 3 media errors.
    for word in (
        "S1/nsid.1",
        "QEMU NVMe Ctrl",
        "128.0 MiB",
        "4096",
        "3 media errors",
        "7 %",
        "478",
        "12",
        "/dev/nvme0n1",
    ):
        assert word in first
    assert "7:0:0:0/node-a/0000:00:03.0/S1" in first
    assert second.startswith("S2/nsid.1")
    assert result.stderr == ("passed over /dev/nvme2n1: it is attached over tcp, not on this machine's bus\n")


def test_list_tells_what_speaks_against_a_drive(machine: Rig) -> None:
    namespace = bytearray(machine.pages[0].identify_pages[0x00, 1, 0])
    namespace[26] = 5  # its fifth LBA format, which QEMU gives 8 bytes of metadata
    machine.pages[0].identify_pages[0x00, 1, 0] = bytes(namespace)
    write(machine.root / "devices/virtual/nvme-subsystem/nvme-subsys1/nvme1n1/holders/md0", "")
    said = run("list").stderr
    assert "S1/nsid.1 cannot hold a pool: its logical blocks carry metadata" in said
    assert "S2/nsid.1 is in use by md0" in said


def test_list_as_documents(machine: Rig, tmp_path: Path) -> None:
    names = tmp_path / "domains.yaml"
    names.write_text("all: {rack: r1}\nserials: {S2: {dpu: dpu-1}}\n")
    as_json = json.loads(run("list", "--domains", str(names), "--format", "json").stdout)
    assert yaml.safe_load(run("list", "--domains", str(names), "--format", "yaml").stdout) == as_json
    first, second = as_json["drives"]
    assert first["key"] == "S1/nsid.1"
    assert first["capacity_bytes"] == 128 << 20
    assert first["capabilities"]["hints_lbas"] == {"npwg": 1, "npwa": 1, "npdg": 1, "npda": 1, "nows": 1}
    assert first["capabilities"]["deallocated_reads_as"] == "zeros"
    assert first["health"]["temperature_c"] == 318 - 273
    assert second["domain"] == {
        "drive": "S2", "port": "0000:00:04.0", "dpu": "dpu-1", "enclosure": "node-a", "rack": "r1",
    }  # fmt: skip
    (passed,) = as_json["passed_over"]
    assert passed["at"] == "/dev/nvme2n1"


@pytest.mark.parametrize("name", ["S1", "S1/nsid.1", "12", "/dev/nvme0n1"])
def test_show_by_any_name(machine: Rig, name: str) -> None:
    result = run("show", name)
    assert result.exit_code == 0
    fields = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert fields["serial"] == "S1"
    assert fields["capabilities.volatile_write_cache"] == "yes"
    assert fields["capabilities.reservations"] == "-"
    assert fields["health.percentage_used"] == "7"
    assert fields["wear.months_left_by_age"] == "477.96"  # 26280 h at 730.5 h a month, times 93 / 7


def test_show_what_is_not_there(machine: Rig) -> None:
    result = run("show", "S9")
    assert result.exit_code == 1
    assert "there is no drive S9" in result.stderr
    result = run("show", "/dev/nvme2n1", "--format", "json")
    assert "attached over tcp" in json.loads(result.stderr)["error"]["message"]


def test_wear(machine: Rig) -> None:
    result = run("wear")
    assert result.exit_code == 0
    # 987,654,321 units of 512,000 bytes on a drive of 128 MiB, in 1095 days.
    first = result.stdout.splitlines()[1].split("  ")
    assert [word.strip() for word in first if word] == [
        "S1/nsid.1", "7 %", "100 %", "459.9 TiB", "3767602.2", "3440.73", "-", "478",
    ]  # fmt: skip
    as_json = json.loads(run("wear", "--format", "json").stdout)
    assert as_json["drives"][0]["written_bytes"] == 987_654_321 * 512_000


def test_locate(machine: Rig) -> None:
    light = next((machine.root / "devices").rglob("locate"))
    result = run("locate", "S1")
    assert (result.exit_code, result.stdout) == (0, "the light of S1/nsid.1 in slot 12 is blinking\n")
    assert light.read_text() == "1"
    assert json.loads(run("locate", "S1", "--off", "--format", "json").stdout) == {
        "key": "S1/nsid.1", "slot": "12", "is_blinking": False,
    }  # fmt: skip
    assert light.read_text() == "0"


def test_no_light(machine: Rig) -> None:
    result = run("locate", "S2")
    assert result.exit_code == 1
    assert "the light of drive S2/nsid.1 cannot be switched" in result.stderr


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(2 << 20))
    result = run("list", "--file", str(tmp_path), "--format", "json")
    (drive,) = json.loads(result.stdout)["drives"]
    assert (drive["kind"], drive["slot"], drive["health"]) == ("file", "a", None)
    assert drive["health_note"].startswith("unknown")
    assert "unknown" in run("list", "--file", str(tmp_path)).stdout
    assert "-" in run("wear", "--file", str(tmp_path)).stdout
    result = run("locate", "a", "--file", str(tmp_path))
    assert result.exit_code == 1
    assert "is a file and has no light" in result.stderr


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(2 << 20))
    result = run("list", "--file", str(tmp_path), "--file", str(tmp_path / "none"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"error: {tmp_path}/none does not exist" in result.stderr
    result = run("list", "--file", str(tmp_path), "--domains", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "docs/drives.md" in result.stderr


def test_a_machine_without_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_sources, "SYSFS", tmp_path)
    result = run("list")
    assert result.exit_code == 0
    assert "no drives here" in result.stderr


def test_wrong_usage(tmp_path: Path) -> None:
    assert run("list", "--file", "x", "--spdk", "y").exit_code == 2
    result = run("list", "--spdk", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "SPDK" in result.stderr
    names = tmp_path / "domains.yaml"
    names.write_text("slots: {7: {shelf: x}}\n")
    result = run("list", "--domains", str(names))
    assert result.exit_code == 1
    assert f"{names}: failure domains: slots.7 has shelf" in result.stderr
