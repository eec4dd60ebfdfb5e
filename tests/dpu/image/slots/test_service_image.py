"""Bundles that a card is to unpack as root: whole, as their manifests say, and harmless."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.formats import Formats, differences, own_formats_text, parse_formats
from meshfusion.dpu.image.bundle import SignatureState
from meshfusion.dpu.image.errors import BundleError
from meshfusion.dpu.image.slots.service_image import formats_of_config, read_service_image
from meshfusion.dpu.store.records import INDEX_VERSION
from meshfusion.jbof.format import FORMAT_VERSION
from tests.dpu.image.slots.script import layer, sha256
from tests.dpu.image.slots.tiny_bundle import Signer, make_bundle, stand_in

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    signer = Signer.make(tmp_path)

    def make(*layers: dict[str, bytes | None] | bytes, **wishes: Any) -> Path:
        return make_bundle(tmp_path / "bundle", signer, "2.0", *(layers or (stand_in("2.0"),)), **wishes)

    return make


def _key(folder: Path) -> bytes:
    return (folder.parent / "key.pub.pem").read_bytes()


def test_what_is_copied_is_named_by_digest_and_can_be_read_from_anywhere(made: Made) -> None:
    upper = layer({"etc/": None, "etc/name": b"x" * 10_000})
    folder = made(stand_in("2.0"), upper)
    told: list[tuple[int, int]] = []
    image = read_service_image(folder, _key(folder), lambda done, total: told.append((done, total)))
    assert image.bundle.signature is SignatureState.VALID
    assert image.wanted.digest == sha256((folder / "manifest.json").read_bytes())
    assert image.wanted.version == "2.0"
    assert image.wanted.layers[1].digest == sha256(upper), "lowest first"
    assert image.unpacked_bytes > 10_000
    assert told[-1] == (image.wanted.layers[0].size_bytes + len(upper),) * 2
    for blob in image.wanted.blobs:
        whole = image.read(blob, 0, blob.size_bytes)
        assert sha256(whole) == blob.digest
        assert image.read(blob, 7, 20) == whole[7:27]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_every_byte_counts(made: Made) -> None:
    folder = made()
    blobs = sorted((folder / "oci/blobs/sha256").iterdir())
    assert len(blobs) == 3
    for path in blobs:
        before = path.read_bytes()
        _flip(path)
        with pytest.raises(BundleError) as raised:
            read_service_image(folder, None)
        assert path.name in raised.value.message
        path.write_bytes(before + b"more")
        with pytest.raises(BundleError):
            read_service_image(folder, None)
        path.unlink()
        with pytest.raises(BundleError, match="does not exist"):
            read_service_image(folder, None)
        path.write_bytes(before)
    read_service_image(folder, None)


def _linked(*members: tuple[str, str | None]) -> bytes:
    """Name and, of a symbolic link, where it leads."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, leads_to in members:
            member = tarfile.TarInfo(name)
            if leads_to is not None:
                member.type, member.linkname = tarfile.SYMTYPE, leads_to
            tar.addfile(member, io.BytesIO(b""))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((_linked(("run", "/run"), ("run/x", None)),), "is below the symbolic link 'run'"),
        ((_linked(("lib", "usr/lib")), _linked(("./lib/x/y", None))), "is below the symbolic link 'lib'"),
        ((_linked(("var", "/etc")), layer({"var/.wh.passwd": b""})), "is below the symbolic link 'var'"),
        ((_linked(("../x", None)),), "holds the name '../x'"),
        ((_linked(("/etc/x", None)),), "holds the name '/etc/x'"),
        ((b"no archive at all" * 40,), "cannot be unpacked"),
    ],
)
def test_what_root_is_not_to_unpack(made: Made, layers: tuple[bytes, ...], said: str) -> None:
    with pytest.raises(BundleError) as raised:
        read_service_image(made(*layers), None)
    assert said in raised.value.message
    assert raised.value.next_step


def test_a_link_that_a_later_layer_replaces_is_none_any_more(made: Made) -> None:
    folder = made(_linked(("lib", "usr/lib")), layer({"lib": None, "lib/x": b"x"}))
    assert len(read_service_image(folder, None).wanted.layers) == 2


def test_a_kind_of_layer_that_tar_does_not_read(made: Made) -> None:
    with pytest.raises(BundleError, match=r"tar\+zstd, which a card cannot unpack"):
        read_service_image(made(layer_type="application/vnd.oci.image.layer.v1.tar+zstd"), None)


def test_a_bundle_without_a_service(made: Made) -> None:
    with pytest.raises(BundleError, match="names no image of the service"):
        read_service_image(made(images=[]), None)


# Formats.


def test_what_this_release_tells_of_itself() -> None:
    found = parse_formats(own_formats_text("9"))
    assert found is not None
    assert (found.version, found.medium, found.index) == ("9", FORMAT_VERSION, INDEX_VERSION)
    assert differences(found, found) == (), "it reads what it writes"


@pytest.mark.parametrize(
    "text", ["", "null", "{}", "[]", json.dumps({"format": 2}), own_formats_text("9").replace("[", "").replace("]", "")]
)
def test_what_is_unknown_is_not_taken_for_compatible(text: str) -> None:
    assert parse_formats(text) is None


def test_an_image_that_does_not_tell(made: Made) -> None:
    assert read_service_image(made(labels=False), None).formats is None
    assert formats_of_config(b'{"config": {"Labels": null}, "architecture": "arm64"}') is None
    assert formats_of_config(b"not JSON") is None


def _formats(medium: int, reads: list[int]) -> Formats:
    return Formats(version="1", medium=medium, index=1, api=1, reads_medium=reads, reads_index=[1])


@pytest.mark.parametrize(
    ("former", "new", "blocks"),
    [
        (_formats(3, [3]), _formats(3, [3]), None),
        (_formats(3, [3]), _formats(4, [4]), (True, True)),
        (_formats(3, [3]), _formats(4, [3, 4]), (False, True)),
        (_formats(3, [3, 4]), _formats(4, [3, 4]), None),
        (_formats(4, [3, 4]), _formats(3, [3]), (True, False)),
    ],
)
def test_differences(former: Formats, new: Formats, blocks: tuple[bool, bool] | None) -> None:
    found = differences(former, new)
    assert [(one.blocks_forward, one.blocks_back) for one in found] == ([] if blocks is None else [blocks])
