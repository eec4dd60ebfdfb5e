"""``mfctl image build --target spdk``: SPDK's target from a Debian package or from an image, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.dpu.image.bundle import Manifest, read_bundle
from meshfusion.dpu.image.bundle_check import content_problems
from meshfusion.tools.image.architecture import ARCHITECTURES
from meshfusion.tools.image.oci_layout import new_layout
from meshfusion.tools.image.tree import FILE, Entry, Tree, text_file
from meshfusion.tools.mfctl.main import mfctl
from tests.tools.image.small import SPDK_CONFIG, World, elf, make_deb, make_world

PROGRAM = "usr/bin/nvmf_tgt"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its lock has a wheel fewer than the project asks for, which nobody looks at here."""
    return make_world(tmp_path_factory.mktemp("world"), config=SPDK_CONFIG)


def build(world: World, folder: Path, *options: str) -> Result:
    return CliRunner().invoke(mfctl, ["image", "build", str(folder), *world.options, "--target", "spdk", *options])


def built(world: World, folder: Path, *options: str) -> Manifest:
    result = build(world, folder, *options)
    assert result.exit_code == 0, result.output
    bundle = read_bundle(folder, None)
    assert content_problems(folder, bundle) == []
    return bundle.manifest


def spdk_deb(
    folder: Path, *, depends: str = "libtwo (>= 1.0), libnone | python3.11", program: bytes | None = None
) -> Path:
    content = elf("arm64") if program is None else program
    files = {PROGRAM: content, "usr/share/nvmf_tgt": b"no program"}
    return make_deb(folder / "spdk.deb", "spdk", files, version="26.09-1", depends=depends, programs=(PROGRAM,))


def spdk_layout(folder: Path, *, architecture: str = "arm64", program: bytes | None = None, images: int = 1) -> Path:
    writer = new_layout(folder)
    base, above = Tree(), Tree()
    base.add(Entry(PROGRAM, FILE | 0o755, data=elf(architecture) if program is None else program), "spdk")
    above.add(text_file("etc/spdk.conf", "x\n"), "spdk")
    layers = [writer.add_layer(tree, "spdk", lambda _: None) for tree in (base, above)]
    image = writer.add_image(layers, ARCHITECTURES[architecture], {}, "2026-01-01T00:00:00Z")
    writer.write_index([(f"example.org/spdk:26.{number}", image) for number in range(images)])
    return folder


def test_a_package_becomes_a_layer_of_the_image(world: World, tmp_path: Path) -> None:
    deb = spdk_deb(tmp_path)
    manifest = built(world, tmp_path / "bundle", "--spdk-deb", str(deb))
    assert manifest.spdk is not None
    assert manifest.spdk.sha256 == hashlib.sha256(deb.read_bytes()).hexdigest()
    assert (manifest.spdk.kind, manifest.spdk.version, manifest.spdk.program) == ("deb", "26.09-1", f"/{PROGRAM}")
    (image,) = manifest.images
    containers = yaml.safe_load((tmp_path / "bundle" / "pod.yaml").read_text())["spec"]["containers"]
    assert [container["image"] for container in containers] == [image.reference] * 2
    command = [f"/{PROGRAM}", "--wait-for-rpc", "-r", "/run/spdk/spdk.sock", "-s", "8192", "-m", "0x3"]
    assert containers[0]["command"] == command
    unit = (tmp_path / "bundle" / "units/etc/systemd/system/meshfusion-spdk.service").read_text()
    assert f"ExecStart={' '.join(command)}\n" in unit
    assert "vm.nr_hugepages = 4096\n" in (tmp_path / "bundle/units/etc/sysctl.d/90-meshfusion.conf").read_text()
    assert not (tmp_path / "bundle/units/etc/modules-load.d").exists(), "the kernel's target is not needed"
    bill = json.loads((tmp_path / "bundle" / "sbom.json").read_bytes())["components"]
    assert "spdk" in {component["name"] for component in bill}


def test_an_image_comes_along_unchanged(world: World, tmp_path: Path) -> None:
    layout = spdk_layout(tmp_path / "layout")
    manifest = built(world, tmp_path / "bundle", "--spdk-base", str(layout))
    service, target = manifest.images
    assert (service.role, target.role) == ("service", "spdk")
    (given,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    assert target.digest == given["digest"]
    assert manifest.spdk is not None
    assert f"sha256:{manifest.spdk.sha256}" == given["digest"]
    blobs = "oci/blobs/sha256"
    there = {path.name for path in (tmp_path / "bundle" / blobs).iterdir()}
    assert {path.name for path in (layout / "blobs/sha256").iterdir()} <= there
    containers = yaml.safe_load((tmp_path / "bundle" / "pod.yaml").read_text())["spec"]["containers"]
    assert [container["image"] for container in containers] == [target.reference, service.reference]
    assert not list((tmp_path / "bundle/units").rglob("meshfusion-spdk.service")), "it runs in a container only"


def test_packages_that_do_not_go_in(world: World, tmp_path: Path) -> None:
    empty = make_deb(tmp_path / "empty.deb", "empty", {"usr/bin/other": b"x"})
    foreign = make_deb(tmp_path / "foreign.deb", "foreign", {PROGRAM: b"x"}, architecture="amd64")
    twice = make_deb(
        tmp_path / "twice.deb", "twice", {PROGRAM: elf("arm64"), "usr/bin/python3.11": b"x"}, programs=(PROGRAM,)
    )
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    cases = (
        (empty, "there is no program nvmf_tgt"),
        (foreign, "is for amd64, not arm64"),
        (spdk_deb(tmp_path / "a", program=elf("amd64")), "its nvmf_tgt is no program for aarch64"),
        (spdk_deb(tmp_path / "b", depends="libtwo (>= 1.1)"), "spdk needs libtwo (>= 1.1)"),
        (spdk_deb(tmp_path / "c", depends="libtwo, libnone"), "spdk needs libnone"),
        (world.config, "dpkg-deb ended with status"),
        (tmp_path / "nowhere", "dpkg-deb ended with status"),
        (twice, "/usr/bin/python3.11 is in the image already, from Debian packages"),
    )  # fmt: skip
    for path, message in cases:
        result = build(world, tmp_path / "bundle", "--spdk-deb", str(path))
        assert (result.exit_code, message in result.output) == (1, True), result.output
    assert not (tmp_path / "bundle").exists()


def test_packages_that_name_each_other_go_in_together(world: World, tmp_path: Path) -> None:
    main = spdk_deb(tmp_path, depends="libthree (= 3)")
    other = make_deb(tmp_path / "three.deb", "libthree", {"usr/lib/libthree.so": b"3"}, version="3", architecture="all")
    manifest = built(world, tmp_path / "bundle", "--spdk-deb", str(other), "--spdk-deb", str(main))
    assert manifest.spdk is not None
    assert manifest.spdk.name == "spdk"


def test_images_that_do_not_go_in(world: World, tmp_path: Path) -> None:
    damaged = spdk_layout(tmp_path / "damaged")
    blob = max((damaged / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1])
    cases = (
        (tmp_path / "nowhere", "does not exist"),
        (spdk_layout(tmp_path / "amd64", architecture="amd64"), "is for linux/amd64, not linux/arm64"),
        (spdk_layout(tmp_path / "script", program=b"#!/bin/sh\n"), "its nvmf_tgt is no program for aarch64"),
        (spdk_layout(tmp_path / "several", images=2), "has 2 images"),
        (damaged, "is not what its digest says"),
    )
    for path, message in cases:
        result = build(world, tmp_path / "bundle", "--spdk-base", str(path))
        assert (result.exit_code, message in result.output) == (1, True), (path, result.output)
    assert not (tmp_path / "bundle").exists()


def test_a_layer_of_plain_tar_is_looked_into(world: World, tmp_path: Path) -> None:
    """Images that others have made need not be compressed."""
    layout = new_layout(tmp_path / "layout")
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        info = tarfile.TarInfo(f"./{PROGRAM}")
        info.size, info.mode = len(elf("arm64")), 0o755
        archive.addfile(info, io.BytesIO(elf("arm64")))
    layer = layout.add_bytes("application/vnd.oci.image.layer.v1.tar", raw.getvalue())
    platform = {"architecture": "arm64", "os": "linux"}
    config = {**platform, "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}}
    described = layout.add_json("application/vnd.oci.image.config.v1+json", config)
    image = {"schemaVersion": 2, "config": described, "layers": [layer]}
    layout.write_index([("spdk:1", layout.add_json("application/vnd.oci.image.manifest.v1+json", image))])
    manifest = built(world, tmp_path / "bundle", "--spdk-base", str(layout.folder))
    assert manifest.spdk is not None
    assert os.path.basename(manifest.spdk.program) == "nvmf_tgt"
