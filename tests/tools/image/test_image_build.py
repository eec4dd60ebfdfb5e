"""``mfctl image build`` of small packages: what is in a bundle, that two builds are the same, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.dpu.image.bf_cfg import assignments, bf_cfg_problems
from meshfusion.dpu.image.bundle import read_bundle
from meshfusion.tools.mfctl.main import mfctl
from tests.tools.image.small import DAY_S, World, commit, git, make_world

RELEASE = "1.30"  # of Kubernetes
SITE = "usr/local/lib/python3.11/dist-packages"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def bundle(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "bundle"
    result = build(world, folder)
    assert result.exit_code == 0, result.output
    return folder


def build(world: World, folder: Path, *options: str) -> Result:
    return CliRunner().invoke(mfctl, ["image", "build", str(folder), *world.options, *options])


def layers(folder: Path) -> list[tarfile.TarFile]:
    """Of the only image, lowest first, found as any reader of OCI layouts finds them."""
    blobs = folder / "oci" / "blobs" / "sha256"
    (image,) = json.loads((folder / "oci" / "index.json").read_bytes())["manifests"]
    manifest = json.loads((blobs / image["digest"].removeprefix("sha256:")).read_bytes())
    return [tarfile.open(blobs / layer["digest"].removeprefix("sha256:")) for layer in manifest["layers"]]


def everything(folder: Path) -> dict[str, str]:
    """Digest and mode of each file below ``folder``."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mode:o}"
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_an_image_has_packages_wheels_and_the_commit_in_a_layer_each(bundle: Path) -> None:
    debian, wheels, own = layers(bundle)
    names = {member.name: member for member in debian}
    assert names["lib"].linkname == "usr/lib", "a merged /usr"
    assert "usr/lib/aarch64-linux-gnu/libtwo.so.2.0" in names
    assert names["usr/lib/aarch64-linux-gnu/libtwo.so.2"].linkname == "libtwo.so.2.0"
    assert names["usr/bin/python3.11"].mode == 0o755
    assert names["usr/bin/python3"].linkname == "python3.11"
    assert names["tmp"].mode == 0o1777
    assert "usr/share/doc/libtwo/copyright" in names, "licences go along"
    assert not {"usr/share/man/man1/two.1.gz", "usr/share/doc/libtwo/changelog.gz"} & names.keys()
    status = debian.extractfile("var/lib/dpkg/status.d/libtwo")
    assert status is not None
    assert b"Package: libtwo\nVersion: 1.0-1\n" in status.read()
    assert {f"{SITE}/one/__init__.py", "usr/local/bin/run-one"} <= set(wheels.getnames())
    script = wheels.extractfile("usr/local/bin/run-one")
    assert script is not None
    assert script.readline() == b"#!/usr/bin/python3.11\n"
    assert f"{SITE}/meshfusion/tools/mfctl/main.py" in own.getnames()
    assert not [name for name in own.getnames() if "test_left_out" in name]
    assert {(m.uid, m.gid) for layer in layers(bundle) for m in layer} == {(0, 0)}


def test_what_the_image_starts_is_the_service_in_the_version_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    """With this machine's Python in place of the image's, which is for another processor."""
    layers(bundle)[2].extractall(tmp_path, filter="tar")
    meshfusion = tmp_path / "usr/local/bin/meshfusion"
    environment = {"PYTHONPATH": str(tmp_path / SITE), "PATH": os.environ["PATH"]}
    ask = "from importlib.metadata import version; print(version('meshfusion'))"
    version = read_bundle(bundle, None).manifest.version
    for argv, said in (([str(meshfusion)], "served"), (["-c", ask], version)):
        done = subprocess.run(
            [sys.executable, *argv], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert done.stdout.strip() == said


def test_the_manifest_names_commit_time_and_every_file(bundle: Path, world: World) -> None:
    manifest = read_bundle(bundle, None).manifest
    head = git(world.repository, "rev-parse", "HEAD")
    assert (manifest.commit, manifest.commit_time_s) == (head, DAY_S)
    assert manifest.version == f"3.4.5+g{head[:12]}"
    assert (manifest.architecture, manifest.target, manifest.spdk) == ("aarch64", "nvmet", None)
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    there = {name: told.split()[0] for name, told in everything(bundle).items() if name != "manifest.json"}
    assert listed == there
    assert manifest.images[0].reference == f"localhost/meshfusion:3.4.5-g{head[:12]}", "a tag has no plus"


def test_two_builds_of_one_commit_are_the_same(world: World, bundle: Path, tmp_path: Path) -> None:
    """Whatever else differs: place, time zone, language, umask, hash seed, order of the cache's files."""
    code = "import os; os.umask(0o077); from meshfusion.tools.mfctl.main import main; main()"
    argv = [sys.executable, "-c", code, "image", "build", str(tmp_path / "again"), *world.options]
    odd = {"TZ": "Asia/Kathmandu", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "5"}
    subprocess.run(argv, env={**os.environ, **odd}, cwd=tmp_path, check=True, capture_output=True)
    first = {name: told.split()[0] for name, told in everything(bundle).items()}
    assert {name: told.split()[0] for name, told in everything(tmp_path / "again").items()} == first


def test_another_commit_changes_the_last_layer_only(world: World, bundle: Path, tmp_path: Path) -> None:
    """So that an upgrade copies little."""
    before = git(world.repository, "rev-parse", "HEAD")
    (world.repository / "jbof" / "new.py").write_text("y = 2\n")
    commit(world.repository, "Second")
    try:
        assert build(world, tmp_path / "new").exit_code == 0
        assert build(world, tmp_path / "old", "--commit", before).exit_code == 0
    finally:
        git(world.repository, "reset", "--quiet", "--hard", before)
    digests = [[Path(str(layer.name)).name for layer in layers(folder)] for folder in (bundle, tmp_path / "new")]
    assert digests[0][:2] == digests[1][:2]
    assert digests[0][2] != digests[1][2]
    assert everything(tmp_path / "old") == everything(bundle), "the former commit is built as before"


def test_what_is_in_no_commit_is_not_built_and_told(world: World, bundle: Path, tmp_path: Path) -> None:
    changed = world.repository / "dpu" / "__init__.py"
    changed.write_text("changed = True\n")
    try:
        result = build(world, tmp_path / "bundle")
    finally:
        git(world.repository, "checkout", "--quiet", ".")
    assert "has changes that are in no commit" in result.output
    assert everything(tmp_path / "bundle") == everything(bundle)


def test_bf_cfg_passes_the_checks_of_a_flash_and_prepares_the_new_system(bundle: Path, tmp_path: Path) -> None:
    text = (bundle / "bf.cfg").read_text()
    assert bf_cfg_problems(text.encode()) == []
    assert (assignments(text)["device"], assignments(text)["ERASE_SSD"]) == ("/dev/mmcblk0", "no")
    root = installed(bundle / "bf.cfg", tmp_path / "root")
    assert (root / "etc/meshfusion/service.yaml").read_bytes() == (bundle / "service.yaml").read_bytes()
    assert (root / "etc/meshfusion/service.yaml").stat().st_mode & 0o777 == 0o600
    unit = "etc/systemd/system/meshfusion.service"
    assert (root / unit).read_bytes() == (bundle / "units" / unit).read_bytes()
    wanted = root / "etc/systemd/system/multi-user.target.wants/meshfusion.service"
    assert os.readlink(wanted) == f"/{unit}"
    assert (root / f"{unit}.d/slots.conf").read_bytes() == (bundle / "slot/slots.conf").read_bytes()
    assert os.access(root / "usr/lib/meshfusion/slotctl", os.X_OK)
    assert os.access(bundle / "slot/slotctl", os.X_OK), "as it is put onto a server by hand"
    assert "nvmet" in (root / "etc/modules-load.d/meshfusion.conf").read_text().split()
    assert (root / "etc/meshfusion/pod.yaml").read_bytes() == (bundle / "pod.yaml").read_bytes()
    assert not (root / "root").exists(), "no key was named"


def installed(bf_cfg: Path, root: Path) -> Path:
    """As the installer does it: bash sources it, then calls the hook."""
    root.mkdir()
    script = 'log() { echo "$*"; }\n. "$1"\nbfb_modify_os\n'
    argv = ["bash", "-c", script, "install", str(bf_cfg)]
    done = subprocess.run(argv, env={**os.environ, "MESHFUSION_ROOT": str(root)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "INFO: MeshFusion is prepared\n", "")
    return root


def test_a_hook_that_fails_says_so_where_a_flash_sees_it(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("no folder")
    script = 'log() { echo "$*"; }\n. "$1"\nbfb_modify_os\n'
    argv = ["bash", "-c", script, "install", str(bundle / "bf.cfg")]
    done = subprocess.run(argv, env={**os.environ, "MESHFUSION_ROOT": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout == "ERROR: MeshFusion could not be prepared\n"


def test_a_card_is_prepared_with_keys_and_a_password(world: World, tmp_path: Path) -> None:
    key, hashed = tmp_path / "key.pub", tmp_path / "hash"
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKey operator@example\n")
    hashed.write_text("$6$salt$abcDEF./123\n")
    device = "/dev/disk/by-id/nvme-BOOT_7"
    result = build(
        world, tmp_path / "b", "--ssh-key", str(key), "--password-hash-file", str(hashed), "--device", device
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = assignments((tmp_path / "b" / "bf.cfg").read_text())
    assert (found["ubuntu_PASSWORD"], found["device"]) == ("$6$salt$abcDEF./123", f"$(readlink -f {device})")
    assert (tmp_path / "b" / "bf.cfg").stat().st_mode & 0o777 == 0o600, "hashes can be guessed at"
    root = installed(tmp_path / "b" / "bf.cfg", tmp_path / "root")
    keys = root / "root/.ssh/authorized_keys"
    assert keys.read_text() == key.read_text()
    assert [path.stat().st_mode & 0o777 for path in (keys, keys.parent)] == [0o600, 0o700]


def test_the_pod_runs_the_image_of_the_bundle_and_asks_where_the_service_answers(bundle: Path) -> None:
    pod = yaml.safe_load((bundle / "pod.yaml").read_text())
    kubernetes_validate.validate(pod, RELEASE, strict=True)
    (container,) = pod["spec"]["containers"]
    assert container["image"] == read_bundle(bundle, None).manifest.images[0].reference
    assert container["imagePullPolicy"] == "Never"
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 9477, "host": "127.0.0.1"}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/etc/meshfusion", "/dev", "/sys/kernel/config", "/etc/machine-id", "/run/meshfusion"} <= mounts
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}


def test_a_server_gets_no_bf_cfg(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", architecture="amd64")
    result = build(world, tmp_path / "bundle", "--arch", "amd64", "--format", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["architecture"] == "x86_64"
    assert "devices" not in document
    assert not (tmp_path / "bundle" / "bf.cfg").exists()
    assert "lib64" in layers(tmp_path / "bundle")[0].getnames()


REFUSED: list[tuple[list[str], tuple[str, str], str]] = [
    (["--target", "spdk"], ("", ""), "--target spdk needs SPDK's target"),
    (["--spdk-base", "x"], ("", ""), "go with --target spdk"),
    (["--commit", "nowhere"], ("", ""), "there is no commit nowhere"),
    (["--source", "/"], ("", ""), "is no checkout of MeshFusion"),
    (["--version", "new one"], ("", ""), "write one like 1.2.0"),
    (["--lock", "/nowhere/lock.json"], ("", ""), "No such file"),
    (["--arch", "amd64"], ("", ""), "amd64.json of"),
    (["--device", "/dev/nvme0n1"], ("", ""), "changes with the drives"),
    (["--device", "mmcblk0"], ("", ""), "is no path below /dev"),
    (["--bfb-sha256", "abc"], ("", ""), "is no SHA-256"),
    ([], ("telemetry: {listen: 127.0.0.1:9477}", ""), "telemetry.listen: is no TCP address"),
    ([], ("127.0.0.1:9477}", "127.0.0.1:9477, probe: false}"), "telemetry.probe = False: is off"),
    ([], ("/var/lib/meshfusion/pool", "/usr/pool"), "pool.path: lies in /usr"),
    ([], ("/var/lib/meshfusion/pool", "/tmp/mine/pool"), "pool.path: lies in /tmp/mine"),
    ([], ("listen: unix", "lissten: unix"), "lissten: unknown key"),
    ([], ("target: nvmet", "target: spdk, spdk: {socket: /run/s/s, memory: 8GiB}"), "build with --target spdk"),
]


@pytest.mark.parametrize(("options", "change", "message"), REFUSED)
def test_what_is_refused(
    world: World, tmp_path: Path, options: list[str], change: tuple[str, str], message: str
) -> None:
    """With one message that names it, and nothing left behind. ``change``: of the configuration."""
    config = tmp_path / "service.yaml"
    config.write_text(world.config.read_text().replace(*change) if change[0] else world.config.read_text())
    folder = tmp_path / "out" / "bundle"
    result = build(world, folder, "--config", str(config), *options)
    assert result.exit_code in (1, 2), result.output
    assert message in " ".join(result.output.split())
    assert list(tmp_path.glob("out/*")) + list(tmp_path.glob("out/.*")) == []


def test_secrets_that_are_none_are_refused_without_being_shown(world: World, tmp_path: Path) -> None:
    for option, content in (("--password-hash-file", "in the clear"), ("--ssh-key", "-----BEGIN PRIVATE KEY-----")):
        (tmp_path / "file").write_text(content)
        result = build(world, tmp_path / "b", option, str(tmp_path / "file"))
        assert (result.exit_code, "in the clear" in result.output) == (1, False)
        assert option in result.output


def test_a_folder_that_is_there_is_left_alone(world: World, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("x")
    result = build(world, tmp_path / "b")
    assert (result.exit_code, "is there already" in result.output) == (1, True)
    assert (tmp_path / "b" / "mine").read_text() == "x"


def test_an_interrupted_build_leaves_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshfusion.tools.image.build.write_images", interrupted)
    assert build(world, tmp_path / "b").exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_removed_by_the_next(world: World, tmp_path: Path) -> None:
    code = (
        "import os, signal, meshfusion.tools.image.build as b\n"
        "b.write_images = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from meshfusion.tools.mfctl.main import main; main()"
    )
    argv = [sys.executable, "-c", code, "image", "build", str(tmp_path / "b"), *world.options]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == -9
    assert [path.name.startswith(".b.building-") for path in tmp_path.iterdir()] == [True]
    assert build(world, tmp_path / "b").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_damaged_cache_is_not_built_from(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fetched again; here there is nowhere to fetch from."""
    wheel = world.cache / "files" / world.lock.wheels[0].sha256
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:-1])
    monkeypatch.setattr("meshfusion.tools.image.store.download_wheels", lambda *_: {})
    try:
        result = build(world, tmp_path / "b")
    finally:
        wheel.write_bytes(whole)
    assert (result.exit_code, "one 1.5 as it is fetched has another digest" in result.output) == (1, True)
    assert "mfctl image lock --arch arm64" in result.output


def test_a_lock_for_other_requirements_is_refused(world: World, tmp_path: Path) -> None:
    project = world.repository / "pyproject.toml"
    before = git(world.repository, "rev-parse", "HEAD")
    project.write_text(project.read_text().replace("one>=1,<2", "one>=1.6,<2"))
    commit(world.repository, "Ask for more")
    try:
        result = build(world, tmp_path / "b")
    finally:
        git(world.repository, "reset", "--quiet", "--hard", before)
    assert result.exit_code == 1
    assert "one>=1,<2, one>=1.6,<2" in result.output
