"""Is a bundle in a folder whole, and what it says it is? Every byte of it is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from meshfusion.dpu.image.bundle import MANIFEST, SIGNATURE, Bundle, FileEntry, SignatureState
from meshfusion.dpu.image.errors import BundleError
from meshfusion.dpu.image.oci import layout_problems, read_index
from meshfusion.jbof.config_problems import ConfigProblem

LAYOUT: Final = "oci"
OCI_ARCHITECTURES: Final = {"aarch64": "arm64", "x86_64": "amd64"}
_AGAIN: Final = "take the bundle from its source again, or build it anew after a change"


def bundle_problems(
    folder: Path, bundle: Bundle, moved: Callable[[int], object] = lambda _: None
) -> list[ConfigProblem]:
    """Everything that is wrong with its signature and its content; empty: nothing is. As :func:`content_problems`."""
    problems = content_problems(folder, bundle, moved)
    if bundle.signature is not SignatureState.VALID:
        fix = "take a bundle from whom you trust, or sign it yourself: mfctl image sign"
        problems.insert(0, ConfigProblem("signature", "cannot be relied on", fix, bundle.signature.value))
    return problems


def content_problems(
    folder: Path, bundle: Bundle, moved: Callable[[int], object] = lambda _: None
) -> list[ConfigProblem]:
    """Everything that is not as its manifest says, or does not fit together. ``moved``: told how many bytes were read
    since the last call.

    Raises OSError for what cannot be read.
    """
    manifest = bundle.manifest
    if manifest.format == 1:
        return []  # read_bundle has compared all that there is to compare
    wanted = {entry.path: entry for entry in manifest.files}
    found = dict(_files(folder))
    problems = [ConfigProblem(path, "is missing", _AGAIN) for path in sorted(wanted.keys() - found.keys())]
    for path, mode in sorted(found.items()):
        if not stat.S_ISREG(mode):
            problems.append(ConfigProblem(path, "is no plain file", _AGAIN))
        elif path in wanted:
            problems += _file_problems(folder, wanted[path], moved)
        elif path not in (MANIFEST, SIGNATURE):
            problems.append(ConfigProblem(path, "is not named by the manifest", "remove it: nothing vouches for it"))
    if problems:
        return problems  # what is inside of what is not whole tells nothing more
    return list(_image_problems(folder / LAYOUT, bundle))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """All but directories, with their modes; links are not followed."""
    for parent, directories, files in os.walk(folder):
        for name in (*directories, *files):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                yield path.relative_to(folder).as_posix(), mode


def _file_problems(folder: Path, entry: FileEntry, moved: Callable[[int], object]) -> Iterator[ConfigProblem]:
    path = folder / entry.path
    size_bytes = path.stat().st_size
    if size_bytes != entry.size_bytes:
        yield ConfigProblem(entry.path, f"has {size_bytes} bytes, the manifest says {entry.size_bytes}", _AGAIN)
        return
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    moved(size_bytes)
    if sha256 != entry.sha256:
        yield ConfigProblem(entry.path, f"has the SHA-256 {sha256}, the manifest says {entry.sha256}", _AGAIN)


def _image_problems(layout: Path, bundle: Bundle) -> Iterator[ConfigProblem]:
    manifest = bundle.manifest
    architecture = OCI_ARCHITECTURES.get(manifest.architecture)
    if architecture is None:
        yield ConfigProblem("architecture", "is not known", _AGAIN, manifest.architecture)
        return
    for problem in layout_problems(layout, architecture):
        yield ConfigProblem(LAYOUT, problem, _AGAIN)
    try:
        there = {descriptor.digest for descriptor in read_index(layout).manifests}
    except BundleError:
        return  # told above
    for image in manifest.images:
        if image.digest not in there:
            yield ConfigProblem("images", f"{image.reference} is not in {LAYOUT}/index.json", _AGAIN, image.digest)
    for digest in sorted(there - {image.digest for image in manifest.images}):
        yield ConfigProblem(LAYOUT, "has an image that the manifest does not name", _AGAIN, digest)
