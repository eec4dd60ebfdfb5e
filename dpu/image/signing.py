"""Signing a bundle: one Ed25519 signature over its manifest, which has the digests of all else."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from meshfusion.dpu.image.bundle import SIGNATURE
from meshfusion.dpu.image.errors import BundleError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_MAX_KEY_BYTES: Final = 1 << 16


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Raises BundleError for a file that others may read or that is no such key, and OSError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode  # of what is read, whatever the name stands for by then
        pem = file.read(_MAX_KEY_BYTES)
    if mode & _OTHERS:
        raise BundleError(
            f"--key: {path} has the mode {stat.S_IMODE(mode):04o}: others may read it or write to it",
            next_step=f"Keep it to yourself, chmod 600 {path}; if others may have read it, make another one.",
        )
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise BundleError(
            f"--key: {path} is encrypted with a password, which is not asked for",
            next_step="Decrypt it for the time of signing: openssl pkey -in KEY -out PLAIN, with umask 077.",
        ) from None
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise BundleError(
            f"--key: {path} holds no Ed25519 private key in PEM",
            next_step="Name the private key, not the public one; --new-key makes one.",
        )
    return key


def new_signing_key(path: Path) -> Path:
    """Makes a key in ``path``, readable by its owner only, and its public one beside it, whose path comes back.

    Raises BundleError where either is there already, and OSError.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    public = path.with_name(f"{path.name}.pub")
    private_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public_pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for place in (path, public):
        if os.path.lexists(place):
            raise BundleError(
                f"--new-key: {place} is there already, and a lost key cannot be made again",
                next_step="Sign with it (without --new-key), or name another place for the new one.",
            )
    _create(public, public_pem, 0o644)
    _create(path, private_pem, 0o600)
    return public


def sign_bundle(folder: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """``manifest``: the bytes that are signed. A signature that is there is replaced, as a whole. Raises OSError."""
    part = folder.parent / f".{folder.name}.{os.getpid()}.sig"  # beside it: nothing else may lie in a bundle
    try:
        part.write_bytes(base64.b64encode(key.sign(manifest)) + b"\n")
        part.replace(folder / SIGNATURE)
    finally:
        part.unlink(missing_ok=True)


def _create(path: Path, data: bytes, mode: int) -> None:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
