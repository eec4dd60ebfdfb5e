"""What a flash needs to know of a service bundle, and reading it from a folder.

The folder holds ``manifest.json``, the ``bf.cfg`` it names, and ``manifest.json.sig``: the Ed25519 signature over the
bytes of the manifest, in base64. The manifest has the digests of all else, so that one signature covers it.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshfusion.dpu.image.errors import BundleError
from meshfusion.jbof.config_problems import ConfigProblemsError, Unlined, describe_errors

MANIFEST: Final = "manifest.json"
SIGNATURE: Final = "manifest.json.sig"
_MAX_MANIFEST_BYTES: Final = 1 << 20
_Sha256 = Annotated[
    str, Field(pattern="^[0-9a-f]{64}$", examples=["e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca"])
]


class SignatureState(enum.Enum):
    VALID = "valid"
    UNSIGNED = "unsigned"
    NOT_CHECKED = "signed, and no key was named to check it with"
    WRONG = "wrong: the manifest was changed, or signed with another key"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Devices(_Strict):
    """The cards a bundle is for. An empty list: any."""

    chips: list[str] = Field(min_length=1, examples=[["BlueField-3"]])
    part_numbers: list[str] = []
    psids: list[str] = []


class BfCfgEntry(_Strict):
    path: str = Field(examples=["bf.cfg"])
    sha256: _Sha256


class Manifest(_Strict):
    """``bfb_sha256``: of the operator's BFB where the bundle was tried with certain ones only. ``nic_firmware``: what
    runs on the NIC once that is installed."""

    format: Literal[1]
    name: str = Field(min_length=1, max_length=100)
    version: str = Field(min_length=1, max_length=100)
    architecture: str = Field(examples=["aarch64"])
    devices: Devices
    bf_cfg: BfCfgEntry
    bfb_sha256: list[_Sha256] = []
    nic_firmware: str | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """``digest``: SHA-256 of the manifest, which stands for the bundle, in hex. ``bf_cfg``: its bytes, of the digest
    that the manifest names."""

    manifest: Manifest
    digest: str
    signature: SignatureState
    bf_cfg: bytes


def read_bundle(folder: Path, public_key_pem: bytes | None) -> Bundle:
    """Raises BundleError, ConfigProblemsError for a manifest with mistakes, and OSError for files that cannot be read.

    Whether the signature will do is the caller's decision.
    """
    raw = _read(folder, MANIFEST)
    manifest = _manifest(folder / MANIFEST, raw)
    bf_cfg = _read(folder, manifest.bf_cfg.path)
    found = hashlib.sha256(bf_cfg).hexdigest()
    if found != manifest.bf_cfg.sha256:
        raise BundleError(
            f"{folder / manifest.bf_cfg.path}: has the SHA-256 {found}, the manifest says {manifest.bf_cfg.sha256}",
            next_step="Take the bundle from its source again, or build it anew after a change.",
        )
    state = _signature_state(folder / SIGNATURE, raw, public_key_pem)
    return Bundle(manifest, hashlib.sha256(raw).hexdigest(), state, bf_cfg)


def _read(folder: Path, name: str) -> bytes:
    if Path(name).name != name:
        raise BundleError(
            f"{folder / MANIFEST}: the path {name!r} is not a name inside the bundle",
            next_step="Build the bundle anew.",
        )
    path = folder / name
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path} does not exist", next_step="Name the folder of a service bundle.") from None
    if len(data) > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{path}: is larger than {_MAX_MANIFEST_BYTES} bytes", next_step="Build the bundle anew.")
    return data


def _manifest(path: Path, raw: bytes) -> Manifest:
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: is not JSON: {error}", next_step="Build the bundle anew.") from None
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        problems = describe_errors(error, Manifest, Unlined(data), root_name="the manifest")
        raise ConfigProblemsError(str(path), tuple(problems), next_step="Build the bundle anew.") from None


def _signature_state(path: Path, signed: bytes, public_key_pem: bytes | None) -> SignatureState:
    from cryptography.exceptions import InvalidSignature

    try:
        signature = base64.b64decode(path.read_bytes().strip(), validate=True)
    except FileNotFoundError:
        return SignatureState.UNSIGNED
    except binascii.Error:
        return SignatureState.WRONG
    if public_key_pem is None:
        return SignatureState.NOT_CHECKED
    try:
        _public_key(public_key_pem).verify(signature, signed)
    except InvalidSignature:
        return SignatureState.WRONG
    return SignatureState.VALID


def _public_key(pem: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise BundleError(
            "the key to check the bundle's signature with is no Ed25519 public key in PEM",
            next_step="Name the public key that belongs to the one it was signed with.",
        )
    return key
