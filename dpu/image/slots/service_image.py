"""The image of the service in a bundle: what of ``oci/`` is copied to a card, read and compared before anything is.

The chain of digests begins with the bundle's signed manifest, which names the image's manifest, which names its
configuration and layers (OCI image-spec v1.1, manifest.md).
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

from pydantic import ValidationError

from meshfusion.dpu.formats import IMAGE_LABEL, Formats, parse_formats
from meshfusion.dpu.image.bundle import MANIFEST, Bundle, read_bundle
from meshfusion.dpu.image.errors import BundleError
from meshfusion.dpu.image.oci import LAYER_TYPES, Descriptor, ImageConfig, blob_path, read_image, read_index
from meshfusion.dpu.image.slots.types import Blob, Wanted

_SERVICE: Final = "service"
_STEP: Final = "Take the bundle from its source again, or build it anew."
_PIECE_BYTES: Final = 1 << 20
_FILE_OVERHEAD_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ServiceImage:
    """``formats``: None where the image does not tell. ``unpacked_bytes``: about what it takes on a card's drive."""

    bundle: Bundle
    wanted: Wanted
    formats: Formats | None
    unpacked_bytes: int
    paths: dict[str, Path]

    @property
    def name(self) -> str:
        return f"{self.bundle.manifest.name} {self.bundle.manifest.version}"

    @property
    def copied_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.wanted.blobs)

    def read(self, blob: Blob, offset_bytes: int, length_bytes: int) -> bytes:
        """Raises OSError. What has changed since it was compared, the card finds out."""
        with self.paths[blob.digest].open("rb") as file:
            file.seek(offset_bytes)
            return file.read(length_bytes)


def read_service_image(
    folder: Path, public_key_pem: bytes | None, told: Callable[[int, int], None] = lambda done, total: None
) -> ServiceImage:
    """Of the bundle in ``folder``; every byte of it was compared with its digest. ``told``: bytes so far, and of all.

    Raises BundleError, ConfigProblemsError for a manifest with mistakes, and OSError. Whether its signature will do is
    the caller's decision.
    """
    bundle = read_bundle(folder, public_key_pem)
    layout = folder / "oci"
    manifest, config = read_image(layout, _service_image(folder, layout, bundle))
    unpacked_bytes = _checked_layers(layout, manifest.layers, told)
    formats = _formats(config)
    manifest_path = folder / MANIFEST
    wanted = Wanted(
        digest=bundle.digest,
        version="" if formats is None else formats.version,
        manifest=Blob(bundle.digest, manifest_path.stat().st_size),
        config=_blob(manifest.config),
        layers=tuple(map(_blob, manifest.layers)),
    )
    paths = {_blob(part).digest: blob_path(layout, part) for part in (manifest.config, *manifest.layers)}
    return ServiceImage(bundle, wanted, formats, unpacked_bytes, paths | {bundle.digest: manifest_path})


def formats_of_config(data: bytes) -> Formats | None:
    """What an image's configuration, as JSON, tells of its formats; None for nothing."""
    try:
        return _formats(ImageConfig.model_validate_json(data))
    except ValidationError:
        return None


def _formats(config: ImageConfig) -> Formats | None:
    labels = config.config.get("Labels")
    return parse_formats(str(labels.get(IMAGE_LABEL, ""))) if isinstance(labels, dict) else None


def _service_image(folder: Path, layout: Path, bundle: Bundle) -> Descriptor:
    digest = next((image.digest for image in bundle.manifest.images if image.role == _SERVICE), None)
    if digest is None:
        raise BundleError(f"{folder / MANIFEST}: names no image of the service", next_step=_STEP)
    found = next((image for image in read_index(layout).manifests if image.digest == digest), None)
    if found is None:
        raise BundleError(f"{layout}: does not hold the image of the service, {digest}", next_step=_STEP)
    return found


def _blob(descriptor: Descriptor) -> Blob:
    return Blob(descriptor.digest.removeprefix("sha256:"), descriptor.size)


def _checked_layers(layout: Path, layers: list[Descriptor], told: Callable[[int, int], None]) -> int:
    """About the bytes that they take unpacked. Raises BundleError for what a card is not to unpack."""
    total_bytes = sum(layer.size for layer in layers)
    before_bytes = unpacked_bytes = 0
    links: set[PurePosixPath] = set()
    for layer in layers:
        path = blob_path(layout, layer)
        if layer.mediaType not in LAYER_TYPES:
            raise BundleError(
                f"{path}: is of the kind {layer.mediaType}, which a card cannot unpack",
                next_step="Build the image with layers that are tar, or tar with gzip.",
            )
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise BundleError(f"{path} does not exist", next_step=_STEP) from None
        with file:
            counted = _Counted(file, partial(_told_from, told, before_bytes, total_bytes))
            unpacked_bytes += _checked_members(path, LAYER_TYPES[layer.mediaType], counted, links)
            while counted.read(_PIECE_BYTES):  # behind the end of the archive
                pass
        if (counted.digest, counted.read_bytes) != (layer.digest.removeprefix("sha256:"), layer.size):
            raise BundleError(f"{path}: is not what its digest says", next_step=_STEP)
        before_bytes += layer.size
    return unpacked_bytes


def _checked_members(path: Path, is_packed: bool, file: _Counted, links: set[PurePosixPath]) -> int:
    """``links``: what is a symbolic link in the layers so far. Nothing may lie below one: unpacked by root on a card,
    it would be written to wherever that leads."""
    unpacked_bytes = 0
    try:
        for member in _members(file, is_packed=is_packed):
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise BundleError(f"{path}: holds the name {member.name!r}", next_step="Build the image anew.")
            below = next((parent for parent in name.parents if parent in links), None)
            if below is not None:
                raise BundleError(
                    f"{path}: holds {member.name!r}, which is below the symbolic link {str(below)!r}",
                    next_step="Build the image so that its layers name each file where it lies.",
                )
            links.discard(name)
            if member.issym():
                links.add(name)
            unpacked_bytes += member.size + _FILE_OVERHEAD_BYTES
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BundleError(f"{path}: cannot be unpacked: {error}", next_step=_STEP) from None
    return unpacked_bytes


def _members(file: _Counted, *, is_packed: bool) -> Iterator[tarfile.TarInfo]:
    source: Any = file  # it reads, which is all that is asked of it
    plain = gzip.GzipFile(fileobj=source, mode="rb") if is_packed else source
    with tarfile.open(fileobj=plain, mode="r|") as tar:
        for member in tar:
            yield member
            tar.members = []  # type: ignore[attr-defined]  # else all of them stay in memory


def _told_from(told: Callable[[int, int], None], before_bytes: int, total_bytes: int, done_bytes: int) -> None:
    told(before_bytes + done_bytes, total_bytes)


class _Counted:
    """A file that is read once, of which digest and progress are kept."""

    def __init__(self, file: BinaryIO, told: Callable[[int], None]) -> None:
        self._file, self._told = file, told
        self._hash, self.read_bytes = hashlib.sha256(), 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def read(self, count: int = -1) -> bytes:
        data = self._file.read(count)
        self._hash.update(data)
        self.read_bytes += len(data)
        self._told(self.read_bytes)
        return data
