"""Writing an OCI image layout (image-spec v1.1, image-layout.md): blobs under their digests, and an index of images."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from meshfusion.tools.image.architecture import Architecture
from meshfusion.tools.image.tree import Tree, write_tar

INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE: Final = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
_LEVEL: Final = 6

Descriptor = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """``diff_id``: digest of the tar before compression. ``made_by``: what it holds, for the image's history."""

    descriptor: Descriptor
    diff_id: str
    made_by: str


@dataclass(frozen=True, slots=True)
class LayoutWriter:
    """``folder``: of the layout, made by :func:`new_layout`."""

    folder: Path

    def add_json(self, media_type: str, value: object) -> Descriptor:
        return self.add_bytes(media_type, canonical_json(value))

    def add_bytes(self, media_type: str, data: bytes) -> Descriptor:
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs" / "sha256" / digest).write_bytes(data)
        return _descriptor(media_type, digest, len(data))

    def add_layer(self, tree: Tree, made_by: str, moved: Callable[[int], object]) -> Layer:
        """``moved``: told how many bytes of files were written since the last call."""
        blobs = self.folder / "blobs" / "sha256"
        part = blobs / "part"
        with part.open("wb") as file:
            packed = _Hashed(file)
            # Neither a name nor a time: both would differ from build to build.
            with gzip.GzipFile("", "wb", _LEVEL, packed, mtime=0) as compressed:  # type: ignore[arg-type]
                plain = _Hashed(compressed)  # type: ignore[arg-type]
                write_tar(tree, plain, moved)  # type: ignore[arg-type]
        digest = packed.sha256.hexdigest()
        part.replace(blobs / digest)
        return Layer(_descriptor(LAYER_TYPE, digest, packed.size_bytes), f"sha256:{plain.sha256.hexdigest()}", made_by)

    def add_image(
        self, layers: Sequence[Layer], architecture: Architecture, settings: Mapping[str, Any], created: str
    ) -> Descriptor:
        """``settings``: the ``config`` of the image's configuration. ``created``: RFC 3339."""
        config = {
            "created": created,
            **_platform(architecture),
            "config": dict(settings),
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created": created, "created_by": layer.made_by} for layer in layers],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": self.add_json(CONFIG_TYPE, config),
            "layers": [layer.descriptor for layer in layers],
        }
        return {**self.add_json(MANIFEST_TYPE, manifest), "platform": _platform(architecture)}

    def write_index(self, images: Sequence[tuple[str, Descriptor]]) -> None:
        """``images``: with the names that a container runtime gives them when it imports the layout."""
        manifests = [
            {
                **descriptor,
                "annotations": {
                    "io.containerd.image.name": name,
                    "org.opencontainers.image.ref.name": name.rpartition(":")[2],
                },
            }
            for name, descriptor in images
        ]
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests}
        (self.folder / "index.json").write_bytes(canonical_json(index))


def new_layout(folder: Path) -> LayoutWriter:
    """An empty one in ``folder``, which is made."""
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "oci-layout").write_bytes(canonical_json({"imageLayoutVersion": "1.0.0"}))
    return LayoutWriter(folder)


def canonical_json(value: object) -> bytes:
    """The same bytes for the same value."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def _descriptor(media_type: str, digest: str, size_bytes: int) -> Descriptor:
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size_bytes}


def _platform(architecture: Architecture) -> dict[str, str]:
    platform = {"architecture": architecture.debian, "os": "linux"}
    return platform | ({"variant": architecture.variant} if architecture.variant else {})


class _Hashed(io.RawIOBase):
    """Passes on what is written, and knows its digest and size."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: Any, /) -> int:
        self._out.write(data)
        self.sha256.update(data)
        self.size_bytes += len(data)
        return len(data)
