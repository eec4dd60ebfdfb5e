"""What a service bundle says of itself, and reading as much of it from its folder as a flash needs.

The folder holds ``manifest.json``, what it names, and ``manifest.json.sig``: the Ed25519 signature over the bytes of
the manifest, in base64. The manifest has the digests of all else, so that one signature covers it. Whether all else is
as it says is told by :mod:`meshfusion.dpu.image.bundle_check`.
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

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from meshfusion.dpu.image.errors import BundleError
from meshfusion.jbof.config_problems import ConfigProblemsError, Unlined, describe_errors
from meshfusion.jbof.errors import FieldValueError

MANIFEST: Final = "manifest.json"
SIGNATURE: Final = "manifest.json.sig"
CARD_ARCHITECTURE: Final = "aarch64"
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


def _inside(path: str) -> str:
    """Of a file in the bundle; it must not lead out of it, on any system."""
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or "\\" in path or not path.isprintable():
        raise FieldValueError("is no path inside the bundle", "write one without .. and without a leading slash")
    return path


class FileEntry(_Strict):
    path: Annotated[str, AfterValidator(_inside)] = Field(max_length=300, examples=["oci/index.json"])
    sha256: _Sha256
    size_bytes: int = Field(ge=0)


class ImageEntry(_Strict):
    """One image of ``oci/``. ``reference``: its name once it is imported; ``digest``: of its manifest."""

    role: Literal["service", "spdk"]
    reference: str = Field(min_length=1, max_length=300, examples=["localhost/meshfusion:1.2.0"])
    digest: str = Field(pattern="^sha256:[0-9a-f]{64}$")


class SpdkEntry(_Strict):
    """Where nvmf_tgt comes from. ``sha256``: of the package's file, or of the image's manifest."""

    kind: Literal["deb", "image"]
    name: str = Field(min_length=1)
    version: str
    sha256: _Sha256
    program: str = Field(description="Path of nvmf_tgt in its image.", examples=["/usr/bin/nvmf_tgt"])


class Manifest(_Strict):
    """``bfb_sha256``: of the operator's BFB where the bundle was tried with certain ones only. ``nic_firmware``: what
    runs on the NIC once that is installed.

    Format 1 knows of nothing but a card's ``bf.cfg``. In format 2 ``files`` names all others too, ``commit`` is what
    the service was built from and ``commit_time_s`` its time, in seconds since 1970; bundles for servers have neither
    ``devices`` nor ``bf_cfg``.
    """

    format: Literal[1, 2]
    name: str = Field(min_length=1, max_length=100)
    version: str = Field(min_length=1, max_length=100)
    architecture: str = Field(examples=["aarch64"])
    devices: Devices | None = None
    bf_cfg: BfCfgEntry | None = None
    bfb_sha256: list[_Sha256] = []
    nic_firmware: str | None = None
    target: Literal["nvmet", "spdk"] | None = None
    commit: str | None = Field(default=None, pattern="^[0-9a-f]{40,64}$")
    commit_time_s: int | None = Field(default=None, ge=0)
    lock_sha256: _Sha256 | None = None
    spdk: SpdkEntry | None = None
    images: list[ImageEntry] = []
    files: list[FileEntry] = []

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        is_for_card = self.architecture == CARD_ARCHITECTURE or self.format == 1
        for name, value in (("devices", self.devices), ("bf_cfg", self.bf_cfg)):
            if is_for_card and value is None:
                raise FieldValueError("is missing", "a bundle for a card has it", field=name)
        if self.format == 2:
            self._check_files()
        return self

    def _check_files(self) -> None:
        found = {entry.path: entry.sha256 for entry in self.files}
        if len(found) < len(self.files):
            raise FieldValueError("names a file twice", "name each once", field="files")
        if found.keys() & {MANIFEST, SIGNATURE}:
            raise FieldValueError("names the manifest or its signature", "leave them out", field="files")
        if self.bf_cfg is not None and found.get(self.bf_cfg.path) != self.bf_cfg.sha256:
            raise FieldValueError("does not name bf_cfg with its digest", "name it as the others", field="files")


@dataclass(frozen=True, slots=True)
class Bundle:
    """``digest``: SHA-256 of the manifest, which stands for the bundle, in hex. ``bf_cfg``: its bytes, of the digest
    that the manifest names; empty where it names none."""

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
    bf_cfg = b"" if manifest.bf_cfg is None else _read_bf_cfg(folder, manifest.bf_cfg)
    state = _signature_state(folder / SIGNATURE, raw, public_key_pem)
    return Bundle(manifest, hashlib.sha256(raw).hexdigest(), state, bf_cfg)


def _read_bf_cfg(folder: Path, entry: BfCfgEntry) -> bytes:
    data = _read(folder, entry.path)
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise BundleError(
            f"{folder / entry.path}: has the SHA-256 {found}, the manifest says {entry.sha256}",
            next_step="Take the bundle from its source again, or build it anew after a change.",
        )
    return data


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
