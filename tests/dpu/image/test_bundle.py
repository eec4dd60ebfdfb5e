"""Bundles in folders, their signatures, and the journals of flashes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.image.bundle import SignatureState, read_bundle
from meshfusion.dpu.image.edge.journal_file import JournalFile
from meshfusion.dpu.image.errors import BundleError, CardError
from meshfusion.dpu.image.flash_types import Phase, Snapshot
from meshfusion.dpu.image.install_log import InstallLog
from meshfusion.dpu.image.journal import Entry, entry_from_json, entry_to_json
from meshfusion.dpu.image.stream import KEPT_BACK_BYTES, Stream
from meshfusion.jbof.config_problems import ConfigProblemsError
from tests.dpu.image.bundle_cases import make_files
from tests.dpu.image.fake_card import BF_CFG, INSTALLATION


def test_a_signed_bundle(tmp_path: Path) -> None:
    files = make_files(tmp_path, nic_firmware="32.41.1000")
    bundle = read_bundle(files.bundle, files.key.read_bytes())
    assert bundle.signature is SignatureState.VALID
    assert (bundle.manifest.nic_firmware, bundle.bf_cfg) == ("32.41.1000", BF_CFG)
    assert read_bundle(files.bundle, None).signature is SignatureState.NOT_CHECKED


def test_a_signature_by_another_key_or_of_another_manifest_is_wrong(tmp_path: Path) -> None:
    files, other = make_files(tmp_path / "a"), make_files(tmp_path / "b")
    assert read_bundle(files.bundle, other.key.read_bytes()).signature is SignatureState.WRONG
    manifest = json.loads((files.bundle / "manifest.json").read_text())
    (files.bundle / "manifest.json").write_text(json.dumps(manifest | {"version": "1.2.1"}))
    assert read_bundle(files.bundle, files.key.read_bytes()).signature is SignatureState.WRONG
    (files.bundle / "manifest.json.sig").write_text("not base64!")
    assert read_bundle(files.bundle, files.key.read_bytes()).signature is SignatureState.WRONG
    (files.bundle / "manifest.json.sig").unlink()
    assert read_bundle(files.bundle, files.key.read_bytes()).signature is SignatureState.UNSIGNED


def test_a_bf_cfg_that_was_changed_is_refused(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    (files.bundle / "bf.cfg").write_bytes(BF_CFG + b"\n")
    with pytest.raises(BundleError, match="has the SHA-256"):
        read_bundle(files.bundle, None)


@pytest.mark.parametrize(
    ("manifest", "word"),
    [
        ("{", "is not JSON"),
        ("[]", "the manifest"),
        ('{"format": 3}', "format"),
        ('{"format": 1, "chips": []}', "chips: unknown key"),
    ],
)
def test_a_manifest_with_mistakes(tmp_path: Path, manifest: str, word: str) -> None:
    files = make_files(tmp_path)
    (files.bundle / "manifest.json").write_text(manifest)
    with pytest.raises((BundleError, ConfigProblemsError), match=word):
        read_bundle(files.bundle, None)


def test_a_path_out_of_the_bundle_is_refused(tmp_path: Path) -> None:
    files = make_files(tmp_path, bf_cfg=BF_CFG)
    manifest = json.loads((files.bundle / "manifest.json").read_text())
    manifest["bf_cfg"]["path"] = "../../etc/shadow"
    (files.bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="is not a name inside the bundle"):
        read_bundle(files.bundle, None)


def test_a_key_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no Ed25519 public key"):
        read_bundle(make_files(tmp_path).bundle, b"-----BEGIN NOTHING-----")


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json does not exist"):
        read_bundle(tmp_path, None)


ENTRY = Entry("image", Snapshot(Phase.INSTALLING, InstallLog().after(INSTALLATION)), 1_700_000_000.5)


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "journal", "ssh://root@host/rshim0")
    assert journal.read() is None
    journal.write(ENTRY)
    with pytest.raises(CardError, match="another process is flashing it"):
        JournalFile(tmp_path / "journal", "ssh://root@host/rshim0")
    journal.close()
    again = JournalFile(tmp_path / "journal", "ssh://root@host/rshim0")
    assert again.read() == ENTRY
    again.close()
    other = JournalFile(tmp_path / "journal", "ssh:__root@host_rshim0")
    assert other.read() is None
    other.close()


@given(st.text(max_size=60) | st.just(entry_to_json(ENTRY)[:-1]) | st.just('{"format": 1}'))
def test_a_journal_of_odd_text_is_none(text: str) -> None:
    assert entry_from_json(text) is None


@given(st.integers(1, 3 * KEPT_BACK_BYTES))
def test_the_last_piece_holds_the_end_of_the_bfb_and_all_of_bf_cfg(size_bytes: int) -> None:
    bfb = bytes(range(256)) * (size_bytes // 256 + 1)
    stream = Stream(lambda: io.BytesIO(bfb), len(bfb), BF_CFG)
    body, last = b"".join(stream.body()), stream.last_piece()
    assert body + last == bfb + BF_CFG
    assert len(last) > len(BF_CFG)
    assert replace(stream, bfb_bytes=len(bfb)).total_bytes == len(body + last)
