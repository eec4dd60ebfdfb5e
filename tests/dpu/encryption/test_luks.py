"""cryptsetup(8) as it is called, on plain files: headers, keys and what they refuse. No device mapper is needed."""

from __future__ import annotations

import json
import os
import struct
import uuid
from pathlib import Path

import pytest

from meshfusion.dpu.encryption.key_file import open_key
from meshfusion.dpu.encryption.note import Slice
from meshfusion.jbof.drives.system.dm_mappings import find_mapping
from meshfusion.jbof.drives.system.luks import Cryptsetup, LuksHeader, parse_header
from meshfusion.jbof.errors import ConfigError, FormatError, UnsupportedError
from tests.dpu.encryption.file_luks import key_file, slice_file

LUKS = Cryptsetup()
UUID = uuid.UUID("11111111-2222-3333-4444-555555555555")


@pytest.fixture
def header(tmp_path: Path) -> Path:
    """Of a slice, opened by ``key`` beside it."""
    slice_file(tmp_path)
    with open_key(key_file(tmp_path)) as key:
        LUKS.format(tmp_path / "slice", tmp_path / "header", key, UUID)
    return tmp_path / "header"


def test_a_header_is_made_off_the_slice_and_is_luks2(header: Path) -> None:
    raw = header.read_bytes()
    # LUKS2 on-disk format specification 1.1.1, 2.1: magic, version, and at 168 the UUID as text.
    assert raw[:6] == b"LUKS\xba\xbe"
    assert struct.unpack_from(">H", raw, 6) == (2,)
    assert raw[168:208].rstrip(b"\0").decode() == str(UUID)
    assert not any((header.parent / "slice").read_bytes())
    assert header.stat().st_mode & 0o777 == 0o600


def test_what_a_header_says(header: Path) -> None:
    assert LUKS.header_of(header) == LuksHeader(UUID, "aes-xts-plain64", 64, 4096, 0, 1)
    assert LUKS.header_of(header).problem == ""


def test_only_its_key_opens_it(header: Path, tmp_path: Path) -> None:
    with open_key(tmp_path / "key") as key, open_key(key_file(tmp_path, "other")) as other:
        assert LUKS.fits(header, key)
        assert LUKS.fits(header, key), "it is read from its begin each time"
        assert not LUKS.fits(header, other)


def test_a_key_is_changed_and_the_volume_key_stays(header: Path, tmp_path: Path) -> None:
    digest = _digest_of_volume_key(header)
    with open_key(tmp_path / "key") as key, open_key(key_file(tmp_path, "new")) as new:
        LUKS.add_key(header, key, new)
        assert LUKS.header_of(header).slot_count == 2
        LUKS.remove_key(header, key)
        assert not LUKS.fits(header, key)
        assert LUKS.fits(header, new)
    assert LUKS.header_of(header).slot_count == 1
    assert _digest_of_volume_key(header) == digest


def _digest_of_volume_key(header: Path) -> str:
    """LUKS2 3.4: what a volume key that a slot gives is compared with."""
    raw = header.read_bytes()[4096 : 4096 + 12 * 1024].split(b"\0")[0]
    digest: str = json.loads(raw)["digests"]["0"]["digest"]
    return digest


def test_a_key_that_does_not_fit_adds_none(header: Path, tmp_path: Path) -> None:
    with (
        open_key(key_file(tmp_path, "other")) as other,
        open_key(key_file(tmp_path, "new")) as new,
        pytest.raises(ConfigError, match="does not open the header"),
    ):
        LUKS.add_key(header, other, new)


def test_an_erased_header_has_no_slot_left(header: Path, tmp_path: Path) -> None:
    LUKS.erase(header)
    assert json.loads(header.read_bytes()[4096 : 4096 + 12 * 1024].split(b"\0")[0])["keyslots"] == {}
    LUKS.erase(header)  # again: nothing to be done


@pytest.mark.parametrize("content", [b"", os.urandom(1 << 20)], ids=["empty", "nonsense"])
def test_what_is_no_header_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "header").write_bytes(content)
    with pytest.raises(FormatError, match="is no LUKS2 header of this service"):
        LUKS.header_of(tmp_path / "header")


def test_without_cryptsetup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(UnsupportedError, match="not installed") as raised:
        LUKS.header_of(tmp_path / "header")
    assert "cryptsetup-bin" in raised.value.next_step


def test_keys_are_in_no_argument_and_no_environment(
    header: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "cryptsetup"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\nenv >{tmp_path}/environment\nexec cat "$5"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SECRET_OF_SOMEBODY", "x")
    with open_key(tmp_path / "key") as key:
        LUKS.fits(header, key)
        expected = ["--batch-mode", "open", "--test-passphrase", "--key-file", f"/proc/self/fd/{key.descriptor}"]
    assert (tmp_path / "arguments").read_text().split()[:5] == expected
    assert "SECRET" not in (tmp_path / "environment").read_text()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"encryption": "cipher_null-ecb"}, "cipher 'cipher_null-ecb' instead of 'aes-xts-plain64'"),
        ({"sector_size": 512}, "sector bytes 512 instead of 4096"),
        ({"offset": "16777216"}, "offset 16777216 instead of 0"),
    ],
)
def test_a_header_with_other_encryption_is_told(change: dict[str, object], problem: str) -> None:
    segment = {"offset": "0", "encryption": "aes-xts-plain64", "sector_size": 4096} | change
    metadata = {"segments": {"0": segment}, "keyslots": {"0": {"key_size": 64}}}
    assert parse_header(str(UUID), json.dumps(metadata)).problem == problem


@pytest.mark.parametrize("metadata", ["", "[]", "{}", '{"segments": {}, "keyslots": {}}'])
def test_metadata_that_is_none(metadata: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_header(str(UUID), metadata)


def test_mappings_are_found_in_sysfs(tmp_path: Path) -> None:
    one = Slice(UUID, Path("/dev/nvme0n1p1"))
    folder = tmp_path / "block" / "dm-3"
    (folder / "dm").mkdir(parents=True)
    (folder / "dm" / "name").write_text(f"{one.name}\n")
    (folder / "dm" / "uuid").write_text(f"{one.mapping_uuid}\n")
    (folder / "slaves" / "nvme0n1p1").mkdir(parents=True)
    (folder / "slaves" / "nvme0n1p1" / "dev").write_text("259:1\n")
    found = find_mapping(one.name, tmp_path)
    assert found is not None
    assert (found.uuid, found.devices) == (one.mapping_uuid, frozenset({"259:1"}))
    assert find_mapping("meshfusion-other", tmp_path) is None
