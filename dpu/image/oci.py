"""Reading an OCI image layout (image-spec v1.1), and finding what in it does not fit together."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshfusion.dpu.image.errors import BundleError

MAX_DOCUMENT_BYTES: Final = 4 << 20
LAYER_TYPES: Final = {
    "application/vnd.oci.image.layer.v1.tar": False,
    "application/vnd.oci.image.layer.v1.tar+gzip": True,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": True,
}
"""Of layers that can be checked here; is it compressed?"""
NAME_ANNOTATION: Final = "io.containerd.image.name"
_PIECE_BYTES: Final = 1 << 20
_Digest = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]


class _Document(BaseModel):
    """The specification lets others add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Descriptor(_Document):
    mediaType: str
    digest: _Digest
    size: int = Field(ge=0)
    annotations: dict[str, str] = {}


class Index(_Document):
    schemaVersion: Literal[2]
    manifests: list[Descriptor]


class ImageManifest(_Document):
    schemaVersion: Literal[2]
    config: Descriptor
    layers: list[Descriptor]


class _RootFs(_Document):
    type: Literal["layers"]
    diff_ids: list[_Digest]


class ImageConfig(_Document):
    architecture: str
    os: str
    rootfs: _RootFs
    config: dict[str, Any] = {}


D = TypeVar("D", bound=_Document)


def read_index(layout: Path) -> Index:
    """Raises BundleError where ``layout`` is no OCI image layout."""
    _read(layout / "oci-layout", _Document)
    return _read(layout / "index.json", Index)


def read_image(layout: Path, descriptor: Descriptor) -> tuple[ImageManifest, ImageConfig]:
    """Each of the digest by which it is named. Raises BundleError."""
    manifest = _read_blob(layout, descriptor, ImageManifest)
    return manifest, _read_blob(layout, manifest.config, ImageConfig)


def blob_path(layout: Path, descriptor: Descriptor) -> Path:
    return layout / "blobs" / "sha256" / descriptor.digest.partition(":")[2]


def layout_problems(layout: Path, architecture: str) -> Iterator[str]:
    """What is wrong with ``layout``, whose images are for ``architecture`` as OCI calls it; in words.

    Every layer is read and unpacked. Blobs that nothing names are told as well.
    """
    named: set[str] = set()
    try:
        index = read_index(layout)
    except BundleError as error:
        yield error.message
        return
    for descriptor in index.manifests:
        try:
            manifest, config = read_image(layout, descriptor)
        except BundleError as error:
            yield error.message
            continue
        named |= {descriptor.digest, manifest.config.digest, *(layer.digest for layer in manifest.layers)}
        if (config.os, config.architecture) != ("linux", architecture):
            yield f"image {descriptor.digest}: is for {config.os}/{config.architecture}, not linux/{architecture}"
        yield from _layer_problems(layout, manifest, config)
    for path in sorted((layout / "blobs" / "sha256").glob("*")):
        if f"sha256:{path.name}" not in named:
            yield f"{path.relative_to(layout)}: is named by no image"


def _layer_problems(layout: Path, manifest: ImageManifest, config: ImageConfig) -> Iterator[str]:
    if len(config.rootfs.diff_ids) != len(manifest.layers):
        yield f"{manifest.config.digest}: has {len(config.rootfs.diff_ids)} diff_ids for {len(manifest.layers)} layers"
        return
    for layer, diff_id in zip(manifest.layers, config.rootfs.diff_ids, strict=True):
        if layer.mediaType not in LAYER_TYPES:
            yield f"layer {layer.digest}: its kind {layer.mediaType} is not known"
            continue
        try:
            packed, plain, size_bytes = _digests(blob_path(layout, layer), is_packed=LAYER_TYPES[layer.mediaType])
        except FileNotFoundError:
            yield f"layer {layer.digest}: is missing"
            continue
        except (OSError, EOFError, zlib.error) as error:
            yield f"layer {layer.digest}: cannot be unpacked: {error}"
            continue
        if (packed, size_bytes) != (layer.digest, layer.size):
            yield f"layer {layer.digest}: has {size_bytes} bytes of the digest {packed}, not {layer.size}"
        if plain != diff_id:
            yield f"layer {layer.digest}: unpacked it is {plain}, not {diff_id}"


def _digests(path: Path, *, is_packed: bool) -> tuple[str, str, int]:
    """Of the file, of what is packed in it, and its size in bytes."""
    with path.open("rb") as file:
        packed = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = file.tell()
        file.seek(0)
        plain = hashlib.sha256()
        with gzip.GzipFile(fileobj=file) if is_packed else file as unpacked:
            while piece := unpacked.read(_PIECE_BYTES):
                plain.update(piece)
    return f"sha256:{packed}", f"sha256:{plain.hexdigest()}", size_bytes


def _read_blob(layout: Path, descriptor: Descriptor, model: type[D]) -> D:
    path = blob_path(layout, descriptor)
    document = _read(path, model)
    data = path.read_bytes()
    if len(data) != descriptor.size or f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor.digest:
        raise BundleError(f"{path}: is not what its digest says", next_step="Take it from its source again.")
    return document


def _read(path: Path, model: type[D]) -> D:
    step = "Take the image from its source again; an OCI image layout is wanted, as skopeo copies to oci:FOLDER."
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path} does not exist", next_step=step) from None
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BundleError(f"{path}: is larger than {MAX_DOCUMENT_BYTES} bytes", next_step=step)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise BundleError(f"{path}: {field}: {first['msg']}", next_step=step) from None
