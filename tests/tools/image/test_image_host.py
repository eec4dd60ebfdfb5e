"""The files for the system that runs an image from a folder, as systemd's own tools read them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from meshfusion.tools.image.host_files import SERVICE_UNIT, SPDK_ROOT, SPDK_UNIT, host_files
from meshfusion.tools.image.service_needs import ServiceNeeds, service_needs
from tests.tools.image.small import CONFIG, SPDK_CONFIG

NEEDS_SYSTEMD = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze (package systemd) is not installed"
)
ELSEWHERE = CONFIG.replace("/var/lib/meshfusion/pool", "/srv/chunks/pool").replace("/run/meshfusion/", "/run/mf/")


def needs(folder: Path, text: str = CONFIG) -> ServiceNeeds:
    path = folder / "service.yaml"
    path.write_text(text)
    return service_needs(path, "spdk" if "target: spdk" in text else "nvmet")


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def complaints(unit: Path) -> list[str]:
    """But for the programs, which are in the image."""
    argv = ["systemd-analyze", "verify", "--man=no", str(unit)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stderr.splitlines()
    return [line for line in said if "meshfusion" in line and "is not executable" not in line]


@NEEDS_SYSTEMD
@pytest.mark.parametrize("text", [CONFIG, ELSEWHERE, SPDK_CONFIG], ids=["nvmet", "elsewhere", "spdk"])
def test_systemd_takes_the_units(tmp_path: Path, text: str) -> None:
    root = written(tmp_path / "root", host_files(needs(tmp_path, text), "/usr/bin/nvmf_tgt"))
    if text == SPDK_CONFIG:
        drop_ins = sorted([*(path.name for path in (root / f"{SERVICE_UNIT}.d").iterdir()), "slots.conf"])
        assert drop_ins[-1] == "spdk.conf", "a slot is picked before the target is started from it"
    for unit in (SERVICE_UNIT, *([SPDK_UNIT] if text == SPDK_CONFIG else [])):
        assert complaints(root / unit) == []
    drop_in = root / f"{SERVICE_UNIT}.d/image.conf"
    drop_in.write_text(drop_in.read_text().replace("BindReadOnlyPaths", "BindReadPaths"))
    assert any("BindReadPaths" in line for line in complaints(root / SERVICE_UNIT)), "the check can fail"


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles (package systemd) is missing")
def test_systemd_makes_the_directories(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs hardware: root, to whom they belong")
    root = written(tmp_path / "root", host_files(needs(tmp_path, ELSEWHERE), None))
    argv = ["systemd-tmpfiles", "--create", f"--root={root}", str(root / "etc/tmpfiles.d/meshfusion.conf")]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    for folder in ("etc/meshfusion", "var/lib/meshfusion", "var/cache/meshfusion", "srv/chunks", "run/mf"):
        assert (root / folder).stat().st_mode & 0o777 == 0o750, folder


def test_spdk_starts_from_the_slot_that_is_current_then(tmp_path: Path) -> None:
    """In a mount namespace of the test's own."""
    if os.geteuid() != 0:
        pytest.skip("needs hardware: root, who may mount")
    root = written(tmp_path / "root", host_files(needs(tmp_path, SPDK_CONFIG), "/usr/bin/nvmf_tgt"))
    slots = tmp_path / "slots"
    for name in ("a", "b"):
        written(slots / name / "root", {"name": name})
    script = (
        'ln -sfn a "$1/current"; sh "$2"; cat "$1/spdk/name"; ln -sfn b "$1/current"; cat "$1/spdk/name"; sh "$2"; '
        'cat "$1/spdk/name"'
    )
    argv = ["unshare", "--mount", "sh", "-euc", script, "sh", str(slots), str(root / SPDK_ROOT)]
    environment = {**os.environ, "MESHFUSION_SLOTS": str(slots), "MESHFUSION_ENTER": ""}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("aab", "")


def test_what_lies_elsewhere_is_bound_into_the_image(tmp_path: Path) -> None:
    usual = host_files(needs(tmp_path), None)[f"{SERVICE_UNIT}.d/image.conf"]
    assert not [line for line in usual.splitlines() if line.startswith("BindPaths")]
    elsewhere = host_files(needs(tmp_path, ELSEWHERE), None)[f"{SERVICE_UNIT}.d/image.conf"]
    assert "BindPaths=/run/mf /srv/chunks" in elsewhere.splitlines()


def test_drives_of_the_configuration_are_opened_to_the_service(tmp_path: Path) -> None:
    unit = host_files(needs(tmp_path), None)[SERVICE_UNIT]
    assert "DeviceAllow=/dev/disk/by-id/nvme-A_1 rw" in unit
    assert "ExecStart=/usr/local/bin/mfctl service run --config /etc/meshfusion/service.yaml" in unit
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit, "mfctl is in the image, and this runs outside"
