"""``mfctl image sign``, ``verify`` and ``inspect``; and what other projects' tools say of our bundles."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from meshfusion.dpu.image.bundle import SignatureState, read_bundle
from meshfusion.dpu.image.bundle_check import content_problems
from meshfusion.tools.image.oci_layout import canonical_json
from meshfusion.tools.mfctl.main import mfctl
from tests.tools.image.small import make_world

PACKAGES = {("deb", "libtwo", "1.0-1"), ("deb", "python3.11", "1:3.11.2-6+deb12u1"), ("pypi", "one", "1.5")}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["image", *arguments])


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, and the keys ``k`` and ``k.pub`` beside it."""
    folder = tmp_path_factory.mktemp("signed")
    world = make_world(folder / "world")
    assert run("build", str(folder / "bundle"), *world.options, "--version", "1.2.0").exit_code == 0
    result = run("sign", str(folder / "bundle"), "--key", str(folder / "k"), "--new-key")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def copy(signed: Path, tmp_path: Path) -> Path:
    shutil.copytree(signed / "bundle", tmp_path / "bundle")
    return tmp_path / "bundle"


def verify(bundle: Path, signed: Path, *options: str) -> Result:
    return run("verify", str(bundle), "--key", str(signed / "k.pub"), *options)


def test_a_signed_bundle_is_good(signed: Path) -> None:
    result = verify(signed / "bundle", signed, "--format", "json")
    assert (result.exit_code, json.loads(result.stdout)["is_valid"]) == (0, True)
    assert (signed / "k").stat().st_mode & 0o777 == 0o600


def test_openssl_makes_and_checks_the_same_signature(signed: Path, tmp_path: Path) -> None:
    """As docs/images.md says, for those who sign without mfctl."""
    manifest = signed / "bundle" / "manifest.json"
    argv = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", str(signed / "k"), "-in", str(manifest)]
    made = subprocess.run([*argv, "-out", str(tmp_path / "raw")], check=True, capture_output=True)
    assert made.returncode == 0
    encoded = subprocess.run(["base64", "-w0", str(tmp_path / "raw")], check=True, capture_output=True).stdout
    assert encoded == (signed / "bundle" / "manifest.json.sig").read_bytes().strip(), "Ed25519 knows one only"


@pytest.mark.parametrize("number", range(12))
def test_a_byte_that_changed_is_told_with_its_file(signed: Path, copy: Path, number: int) -> None:
    """In each file of a bundle, as long as there are any."""
    listed = [entry.path for entry in read_bundle(copy, None).manifest.files]
    chosen = listed[number::12]
    assert chosen, "fewer files than cases"
    for name in chosen:
        path = copy / name
        whole = path.read_bytes()
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        result = verify(copy, signed)
        assert (result.exit_code, name in result.output) == (1, True), (name, result.output)
        path.write_bytes(whole)
    assert verify(copy, signed).exit_code == 0


def _remove(bundle: Path) -> None:
    (bundle / "sbom.json").unlink()


def _add(bundle: Path) -> None:
    (bundle / "slot" / "more").write_text("x")


def _link(bundle: Path) -> None:
    (bundle / "pod.yaml").rename(bundle.parent / "pod.yaml")
    (bundle / "pod.yaml").symlink_to(bundle.parent / "pod.yaml")


def _cut(bundle: Path) -> None:
    with (bundle / "service.yaml").open("ab") as file:
        file.truncate(3)


def _unsign(bundle: Path) -> None:
    (bundle / "manifest.json.sig").unlink()


def _rename(bundle: Path) -> None:
    path = bundle / "manifest.json"
    path.write_text(path.read_text().replace('"1.2.0"', '"1.3.0"'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_remove, "sbom.json: is missing"),
        (_add, "slot/more: is not named by the manifest"),
        (_link, "pod.yaml: is no plain file"),
        (_cut, "service.yaml: has 3 bytes"),
        (_unsign, "signature = 'unsigned'"),
        (_rename, "signature = 'wrong"),
    ],
)
def test_what_is_not_as_it_was(signed: Path, copy: Path, change: Callable[[Path], None], message: str) -> None:
    change(copy)
    result = verify(copy, signed)
    assert (result.exit_code, message in result.output.replace('"', "'")) == (1, True), result.output


def rewritten(bundle: Path, edit: Callable[[dict[str, Any], dict[str, Any], dict[str, Any], bytes], bytes]) -> Path:
    """``edit`` changes index, image manifest and configuration, and gives the last layer; every digest that a file has
    in the bundle's own manifest is then right again, so that only what is inside tells."""
    blobs = bundle / "oci" / "blobs" / "sha256"
    index = json.loads((bundle / "oci" / "index.json").read_bytes())
    former = index["manifests"][0]["digest"][7:]
    image = json.loads((blobs / former).read_bytes())
    config = json.loads((blobs / image["config"]["digest"][7:]).read_bytes())
    layer = image["layers"][-1]["digest"][7:]
    data = edit(index, image, config, (blobs / layer).read_bytes())
    for old in (former, image["config"]["digest"][7:], layer):
        (blobs / old).unlink(missing_ok=True)

    def put(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    image["layers"][-1] |= put(data)
    image["config"] |= put(canonical_json(config))
    index["manifests"][0] |= put(canonical_json(image))
    (bundle / "oci" / "index.json").write_bytes(canonical_json(index))
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    manifest["images"][0]["digest"] = index["manifests"][0]["digest"]
    names = sorted(p for p in bundle.rglob("*") if p.is_file() and not p.name.startswith("manifest.json"))
    manifest["files"] = [
        {
            "path": path.relative_to(bundle).as_posix(),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size_bytes": path.stat().st_size,
        }
        for path in names
    ]
    (bundle / "manifest.json").write_bytes(canonical_json(manifest))
    return bundle


def _as_it_is(index: Any, image: Any, config: Any, layer: bytes) -> bytes:
    return layer


def _another_processor(index: Any, image: Any, config: Any, layer: bytes) -> bytes:
    config["architecture"] = "amd64"
    return layer


def _another_layer(index: Any, image: Any, config: Any, layer: bytes) -> bytes:
    return gzip.compress(b"x" * 10240)


def _no_layer(index: Any, image: Any, config: Any, layer: bytes) -> bytes:
    return b"not gzip"


def _cut_layer(index: Any, image: Any, config: Any, layer: bytes) -> bytes:
    return layer[:-9]


def _unknown_kind(index: Any, image: Any, config: Any, layer: bytes) -> bytes:
    image["layers"][-1]["mediaType"] = "application/x-other"
    return layer


def _fewer_ids(index: Any, image: Any, config: Any, layer: bytes) -> bytes:
    config["rootfs"]["diff_ids"].pop()
    return layer


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_as_it_is, ""),
        (_another_processor, "is for linux/amd64, not linux/arm64"),
        (_another_layer, "unpacked it is"),
        (_no_layer, "cannot be unpacked"),
        (_cut_layer, "cannot be unpacked"),
        (_unknown_kind, "its kind application/x-other is not known"),
        (_fewer_ids, "2 diff_ids for 3 layers"),
    ],
)
def test_an_image_that_does_not_fit_together(signed: Path, copy: Path, edit: Any, message: str) -> None:
    """However right its files' digests are and whoever signs it."""
    rewritten(copy, edit)
    (copy / "manifest.json.sig").unlink()
    result = run("sign", str(copy), "--key", str(signed / "k"))
    assert (result.exit_code == 0) is (not message), result.output
    assert message in result.output
    told = [str(problem) for problem in content_problems(copy, read_bundle(copy, None))]
    assert any(message in one for one in told) if message else told == []


def test_blobs_and_images_that_nobody_names_are_told(signed: Path, copy: Path) -> None:
    (copy / "oci" / "blobs" / "sha256" / ("0" * 64)).write_bytes(b"")
    rewritten(copy, _as_it_is)
    result = run("sign", str(copy), "--key", str(signed / "k"))
    assert (result.exit_code, f"{'0' * 64}: is named by no image" in result.output) == (1, True)


def test_keys_that_will_not_do(signed: Path, copy: Path, tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    shutil.copy(signed / "k", loose)
    loose.chmod(0o640)
    rsa = tmp_path / "rsa"
    argv = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(rsa)]
    subprocess.run(argv, check=True, capture_output=True)
    locked = tmp_path / "locked"
    argv = ["openssl", "pkey", "-in", str(signed / "k"), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(argv, check=True, capture_output=True)
    for path in (rsa, locked):
        path.chmod(0o600)
    before = (copy / "manifest.json.sig").read_bytes()
    for path, message in (
        (loose, "has the mode 0640"),
        (rsa, "holds no Ed25519 private key"),
        (signed / "k.pub", "has the mode 0644"),
        (locked, "is encrypted with a password"),
        (tmp_path / "none", "No such file"),
    ):
        result = run("sign", str(copy), "--key", str(path))
        assert (result.exit_code, message in result.output) == (1, True), result.output
    assert (copy / "manifest.json.sig").read_bytes() == before
    assert [path.name for path in copy.parent.iterdir() if path.name.startswith(".")] == []


def test_a_new_key_never_replaces_one(signed: Path, copy: Path) -> None:
    before = (signed / "k").read_bytes()
    result = run("sign", str(copy), "--key", str(signed / "k"), "--new-key")
    assert (result.exit_code, "is there already" in result.output) == (1, True)
    assert (signed / "k").read_bytes() == before


def test_inspect_tells_what_is_in_it(signed: Path) -> None:
    table = run("inspect", str(signed / "bundle"), "--packages")
    assert table.exit_code == 0
    for text in ("1.2.0", "localhost/meshfusion:1.2.0", "libtwo", "BlueField-3", "2 deb, 1 generic, 1 pypi"):
        assert text in table.output
    document = json.loads(run("inspect", str(signed / "bundle"), "--packages", "--format", "json").stdout)
    assert document["package_counts"] == {"generic": 1, "deb": 2, "pypi": 1}
    assert {(p["kind"], p["name"], p["version"]) for p in document["packages"]} >= PACKAGES
    assert document["signature"] == SignatureState.NOT_CHECKED.value


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"components": [1]}'])
def test_inspect_of_a_bill_that_is_none(copy: Path, content: bytes) -> None:
    (copy / "sbom.json").write_bytes(content)
    result = run("inspect", str(copy))
    assert (result.exit_code, "is no bill of materials" in result.output) == (1, True)


def test_the_bill_of_materials_keeps_cyclonedx_schema(signed: Path) -> None:
    text = (signed / "bundle" / "sbom.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = json.loads(text)["components"]
    for component in components:
        assert PackageURL.from_string(component["purl"]).to_string() == component["purl"]
    found = {(PackageURL.from_string(c["purl"]).type, c["name"], c["version"]) for c in components}
    assert found - {("generic", "meshfusion", "1.2.0")} == PACKAGES
    assert {c["name"]: c.get("licenses") for c in components}["one"] == [{"expression": "MIT"}]


def test_skopeo_reads_the_image_and_copies_it_with_every_digest(signed: Path, tmp_path: Path) -> None:
    image = f"oci:{signed}/bundle/oci:1.2.0"
    told = subprocess.run(["skopeo", "inspect", image], check=True, capture_output=True).stdout
    assert {key: json.loads(told)[key] for key in ("Architecture", "Os")} == {"Architecture": "arm64", "Os": "linux"}
    policy = tmp_path / "policy.json"
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    argv = ["skopeo", "--policy", str(policy), "copy", image, f"dir:{tmp_path}/copy"]
    subprocess.run(argv, check=True, capture_output=True)
    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_bytes())
    assert len(manifest["layers"]) == 3


def test_umoci_unpacks_the_image_to_the_files_of_its_packages(signed: Path, tmp_path: Path) -> None:
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    image = f"{signed}/bundle/oci:1.2.0"
    argv = ["umoci", "unpack", *rootless, "--image", image, str(tmp_path / "unpacked")]
    subprocess.run(argv, check=True, capture_output=True)
    root = tmp_path / "unpacked" / "rootfs"
    assert (root / "lib/aarch64-linux-gnu/libtwo.so.2").read_bytes() == b"two", "through both links"
    assert (root / "usr/local/lib/python3.11/dist-packages/one/__init__.py").read_bytes() == b"x = 1\n"
    assert os.access(root / "usr/local/bin/meshfusion", os.X_OK)
    assert (root / "etc/python.conf").read_bytes() == b"x"
