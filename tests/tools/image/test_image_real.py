"""Bundles of the committed locks, built for real; the one for DPUs runs here, its processor emulated."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfusion.dpu.image.bundle import read_bundle
from meshfusion.dpu.image.bundle_check import content_problems
from meshfusion.tools.mfctl.main import mfctl
from tests.tools.image.small import CONFIG

ROOT = Path(__file__).parents[3]
VERSION = "9.8.7"
STARTS_S = 240.0

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def build(folder: Path, architecture: str) -> Path:
    config = folder.parent / "service.yaml"
    config.write_text(CONFIG)
    options = ["--config", str(config), "--arch", architecture, "--version", VERSION, "--source", str(ROOT)]
    result = CliRunner().invoke(mfctl, ["image", "build", str(folder), *options])
    assert result.exit_code == 0, result.output
    assert content_problems(folder, read_bundle(folder, None)) == []
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arm64") / "bundle", "arm64")


def test_two_builds_are_the_same(bundle: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "bundle", "arm64")
    assert subprocess.run(["diff", "-r", str(bundle), str(again)], capture_output=True, check=False).stdout == b""


def test_a_server_runs_its_image(tmp_path: Path) -> None:
    """Of this machine's own processor, so that it can be entered as it is."""
    if os.uname().machine != "x86_64" or os.geteuid() != 0:
        pytest.skip("needs hardware: an x86-64 processor, and root to enter an image")
    root = unpacked(build(tmp_path / "bundle", "amd64"), tmp_path / "image")
    ask = "import meshfusion.tools.mfctl.daemon, platform; print(platform.libc_ver()[1])"
    done = subprocess.run(["chroot", str(root), "/usr/bin/python3", "-c", ask], capture_output=True, text=True)
    assert done.stdout.strip() == "2.36", done.stderr
    done = subprocess.run(["chroot", str(root), "/usr/local/bin/mfctl", "--version"], capture_output=True, text=True)
    assert VERSION in done.stdout, done.stderr


def unpacked(bundle: Path, folder: Path) -> Path:
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    argv = ["umoci", "unpack", *rootless, "--image", f"{bundle}/oci:{VERSION}", str(folder)]
    subprocess.run(argv, check=True, capture_output=True)
    return folder / "rootfs"


@pytest.fixture(scope="module")
def python(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the image's Python. It lies where that is, so that it takes itself for it and starts others the same way."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    assert emulator, "qemu-user is missing; tools/test --nightly installs it"
    root = unpacked(bundle, tmp_path_factory.mktemp("image") / "arm64")
    script = root / "usr/bin/python-emulated"
    script.write_text(f'#!/bin/sh\nexec {emulator} -L {root} -0 {script} {root}/usr/bin/python3.11 "$@"\n')
    script.chmod(0o755)
    return script


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "NUMBA_CACHE_DIR": str(folder / "numba"), "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_image_of_a_dpu_has_all_that_its_service_imports(python: Path, tmp_path: Path) -> None:
    ask = (
        "import platform, meshfusion.tools.mfctl.daemon, meshfusion.dpu.export.nvmet.target; print(platform.machine())"
    )
    done = subprocess.run([str(python), "-c", ask], env=environment(tmp_path), capture_output=True, text=True)
    assert done.stdout == "aarch64\n", done.stderr


@pytest.fixture
def service(python: Path, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Address of the service that runs from the image, and the port for monitors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "service.yaml"
    config.write_text(
        f"listen: unix://{tmp_path}/s\n"
        f"pool: {{path: {tmp_path}/pool, create: true, size: 8MiB, segment_size: 1MiB}}\n"
        f"telemetry: {{listen: 127.0.0.1:{port}, probe_interval_s: 2}}\n"
    )
    argv = [str(python), str(python.parents[1] / "local/bin/meshfusion"), "--config", str(config)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(argv, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready "), (tmp_path / "log").read_text()
        yield f"unix://{tmp_path}/s", port
    finally:
        process.terminate()
        assert process.wait(60) == 0, (tmp_path / "log").read_text()


def test_the_image_of_a_dpu_serves_chunks(service: tuple[str, int]) -> None:
    """It says ready only when a chunk was written and read back."""
    address, port = service
    end = time.monotonic() + STARTS_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as answer:
                assert answer.status == 200
                break
        except (urllib.error.URLError, TimeoutError):
            assert time.monotonic() < end, "not ready"
            time.sleep(1)
    result = CliRunner().invoke(mfctl, ["service", "state", "--service", address, "--format", "json"])
    assert result.exit_code == 0, result.output
    assert f'"version": "{VERSION}"' in result.stdout
