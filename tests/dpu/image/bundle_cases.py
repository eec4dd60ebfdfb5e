"""Bundles, keys and BFBs for tests."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.dpu.image.fake_card import BF_CFG, tiny_bfb


@dataclass(frozen=True)
class Files:
    bundle: Path
    bfb: Path
    key: Path

    @property
    def options(self) -> list[str]:
        return ["--bundle", str(self.bundle), "--bfb", str(self.bfb), "--key", str(self.key)]


def make_files(
    folder: Path, *, bf_cfg: bytes = BF_CFG, is_signed: bool = True, bfb: bytes | None = None, **changes: Any
) -> Files:
    """A whole bundle with its BFB and public key. ``changes``: of the manifest."""
    bundle = folder / "bundle"
    bundle.mkdir(parents=True)
    manifest = {
        "format": 1,
        "name": "meshfusion-dpu",
        "version": "1.2.0",
        "architecture": "aarch64",
        "devices": {"chips": ["BlueField-3"]},
        "bf_cfg": {"path": "bf.cfg", "sha256": hashlib.sha256(bf_cfg).hexdigest()},
    } | changes
    raw = json.dumps(manifest).encode()
    key = Ed25519PrivateKey.generate()
    (bundle / "manifest.json").write_bytes(raw)
    (bundle / "bf.cfg").write_bytes(bf_cfg)
    if is_signed:
        (bundle / "manifest.json.sig").write_bytes(base64.b64encode(key.sign(raw)) + b"\n")
    (folder / "key.pem").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    (folder / "image.bfb").write_bytes(tiny_bfb(3_000_000) if bfb is None else bfb)
    return Files(bundle, folder / "image.bfb", folder / "key.pem")
