"""The service as a pod: what is imported is an image, and the manifest is there only while the slot's pod may run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest

from meshfusion.dpu.image.oci import layout_problems, read_index
from tests.dpu.image.slots.script import Script, layer

SLOT_POD = Path(str(files("meshfusion.dpu.image.slots").joinpath("data/slot-pod")))
UNIT = files("meshfusion.dpu.image.slots").joinpath("data/slots-pod.unit").read_text()
CTR = """#!/bin/sh
case "$3 $4" in
    "images ls") cat "$NOTES/images" 2>/dev/null ;;
    "images import") n=$(ls "$NOTES" | grep -c tar); cat >"$NOTES/import-$n.tar"
        tar -xOf "$NOTES/import-$n.tar" index.json | sed 's/.*image.name":"//; s/".*//' >>"$NOTES/images"
        echo >>"$NOTES/images" ;;
    "images rm") grep -vxF "$5" "$NOTES/images" >"$NOTES/images.new"; mv "$NOTES/images.new" "$NOTES/images" ;;
    *) exit 1 ;;
esac
"""
CRICTL = """#!/bin/sh
[ "$*" = "pods --quiet --state Ready --name ^meshfusion-" ] || exit 1
# It runs as long as its manifest is there, and for one look more.
[ -e "$MESHFUSION_MANIFESTS/meshfusion.yaml" ] && echo 1 >"$NOTES/left" && echo 0123
[ -s "$NOTES/left" ] && echo 0123 && : >"$NOTES/left"
[ -e "$NOTES/stuck" ] && echo 0123
exit 0
"""
POD = """\
spec:
  containers:
  - {name: service, image: localhost/meshfusion:1.2.0+g0123}
  - image: localhost/meshfusion:1.2.0+g0123
"""


@dataclass
class Pods:
    script: Script
    manifests: Path

    def run(self, verb: str) -> subprocess.CompletedProcess[str]:
        folder = self.script.folder
        environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "NOTES": str(folder),
            "MESHFUSION_SLOTS": str(folder / "slots"),
            "MESHFUSION_POD": str(folder / "pod.yaml"),
            "MESHFUSION_MANIFESTS": str(self.manifests),
            "MESHFUSION_POD_STOP_S": "1",
        }
        return subprocess.run([str(SLOT_POD), verb], env=environment, capture_output=True, text=True, timeout=60)

    @property
    def images(self) -> list[str]:
        return (self.script.folder / "images").read_text().split()


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    script = Script(tmp_path / "card")
    (script.folder / "bin").mkdir()
    for name, text in {"ctr": CTR, "crictl": CRICTL}.items():
        (script.folder / "bin" / name).write_text(text)
        (script.folder / "bin" / name).chmod(0o755)
    (script.folder / "pod.yaml").write_text(POD)
    digest = script.fill("a", layer({"usr/": None, "usr/name": b"one"}))
    script.run("arm", "a", "t-1", "50", digest, check=True)
    script.run("pick", check=True)
    script.service("running")
    script.run("commit", "t-1", check=True)
    return Pods(script, script.folder / "manifests")


def test_the_picked_slot_becomes_a_pod(pods: Pods, tmp_path: Path) -> None:
    up = pods.run("up")
    assert up.returncode == 0, up.stderr
    (reference,) = pods.images
    manifest = (pods.manifests / "meshfusion.yaml").read_text()
    assert manifest == POD.replace("localhost/meshfusion:1.2.0+g0123", reference)
    with tarfile.open(pods.script.folder / "import-0.tar") as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    layout = tmp_path / "layout"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    assert list(layout_problems(layout, machine)) == []
    (image,) = read_index(layout).manifests
    assert image.annotations["io.containerd.image.name"] == reference
    (biggest,) = sorted((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)[-1:]
    with tarfile.open(biggest) as found:
        member = found.extractfile("./usr/name")
        assert member is not None
        assert member.read() == b"one"
    assert [path.name for path in pods.manifests.iterdir()] == ["meshfusion.yaml"]
    assert not list((pods.script.folder / "slots").glob("pod.*"))

    down = pods.run("down")
    assert (down.returncode, list(pods.manifests.iterdir())) == (0, [])
    assert pods.run("up").returncode == 0
    assert not (pods.script.folder / "import-1.tar").exists(), "it is imported already"


def test_only_the_image_that_runs_is_kept(pods: Pods) -> None:
    pods.run("up")
    (first,) = pods.images
    second = pods.script.fill("b", layer({"usr/": None, "usr/name": b"two"}), name="two")
    pods.script.run("arm", "b", "t-2", "50", second, check=True)
    pods.script.run("pick", check=True)
    assert pods.run("up").returncode == 0
    assert len(pods.images) == 1
    assert pods.images != [first]


def test_a_pod_that_does_not_end_keeps_the_next_one_from_starting(pods: Pods) -> None:
    (pods.script.folder / "stuck").touch()
    down = pods.run("down")
    assert (down.returncode, "still runs" in down.stderr) == (1, True)
    assert "ExecStartPre=/usr/lib/meshfusion/slot-pod down" in UNIT


def test_what_is_missing_is_named(pods: Pods) -> None:
    (pods.script.folder / "pod.yaml").write_text("spec: {}\n")
    assert "has no image: localhost/meshfusion:" in pods.run("up").stderr
    (pods.script.folder / "pod.yaml").unlink()
    assert "put the pod.yaml of the bundle there" in pods.run("up").stderr
    assert not pods.manifests.exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze (package systemd) is missing")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "meshfusion.service"
    for text, is_fine in ((UNIT, True), (UNIT.replace("RemainAfterExit", "RemainsAfterExit"), False)):
        unit.write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(unit)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
        assert ("Unknown key" not in said) == is_fine, said
