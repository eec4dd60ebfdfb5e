"""SPDK's target for an image. It is in no registry, so that an operator names a package or an image that has it."""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import struct
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.dpu.image.bundle import SpdkEntry
from meshfusion.dpu.image.oci import LAYER_TYPES, Descriptor, blob_path, layout_problems, read_image, read_index
from meshfusion.tools.image.architecture import Architecture
from meshfusion.tools.image.deb_content import DebControl, deb_control, deb_entries
from meshfusion.tools.image.errors import BuildError
from meshfusion.tools.image.tree import Entry, Tree

PROGRAM: Final = "nvmf_tgt"
_ELF_MACHINE_AT: Final = 18
_DEPENDENCY: Final = re.compile(r"(?P<name>[a-z0-9][a-z0-9+.-]*)(?::\w+)?\s*(?:\((?P<op>[<>=]+)\s*(?P<version>\S+)\))?")


@dataclass(frozen=True, slots=True)
class SpdkPackages:
    """Debian packages of which one, the one at ``main``, has nvmf_tgt. ``sha256s``: of their files."""

    paths: tuple[Path, ...]
    controls: tuple[DebControl, ...]
    sha256s: tuple[str, ...]
    main: int
    program: str

    @property
    def entry(self) -> SpdkEntry:
        control = self.controls[self.main]
        return SpdkEntry(
            kind="deb", name=control.name, version=control.version, sha256=self.sha256s[self.main],
            program=self.program,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpdkImage:
    """An OCI image layout with one image that has nvmf_tgt."""

    layout: Path
    descriptor: Descriptor
    program: str

    @property
    def entry(self) -> SpdkEntry:
        name = self.descriptor.annotations.get("org.opencontainers.image.ref.name", self.layout.name)
        digest = self.descriptor.digest.partition(":")[2]
        return SpdkEntry(kind="image", name=name, version="", sha256=digest, program=self.program)


def spdk_packages(paths: Sequence[Path], architecture: Architecture, there: dict[str, str]) -> SpdkPackages:
    """``there``: versions of the packages that the image has, by name. Raises BuildError and OSError."""
    controls = tuple(map(deb_control, paths))
    for path, control in zip(paths, controls, strict=True):
        if control.architecture not in (architecture.debian, "all"):
            raise BuildError(
                f"--spdk-deb {path}: is for {control.architecture}, not {architecture.debian}",
                next_step=f"Name a package for {architecture.debian}, or build with --arch {control.architecture}.",
            )
    _check_dependencies(controls, there)
    sha256s = tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    for number, path in enumerate(paths):
        program = _program(deb_entries(path), architecture, str(path))
        if program is not None:
            return SpdkPackages(tuple(paths), controls, sha256s, number, program)
    raise _no_program("--spdk-deb", ", ".join(map(str, paths)))


def spdk_tree(packages: SpdkPackages, architecture: Architecture) -> Tree:
    tree = Tree(frozenset(architecture.links))
    for path, control in zip(packages.paths, packages.controls, strict=True):
        tree.add_all(deb_entries(path), control.name)
    return tree


def spdk_image(layout: Path, architecture: Architecture) -> SpdkImage:
    """Every digest in it is compared. Raises BuildError and BundleError."""
    index = read_index(layout)
    if len(index.manifests) != 1:
        raise BuildError(
            f"--spdk-base {layout}: has {len(index.manifests)} images, and it must be clear which",
            next_step="Copy the one into a folder of its own: skopeo copy --override-arch ... oci:FOLDER",
        )
    problems = list(layout_problems(layout, architecture.debian))
    if problems:
        raise BuildError(
            f"--spdk-base {layout}: {problems[0]}",
            next_step=f"Name an OCI image layout of a whole image for linux/{architecture.debian}.",
        )
    (descriptor,) = index.manifests
    manifest, _ = read_image(layout, descriptor)
    for layer in reversed(manifest.layers):
        program = _program(_layer_files(layout, layer), architecture, str(layout))
        if program is not None:
            return SpdkImage(layout, descriptor, program)
    raise _no_program("--spdk-base", str(layout))


def copy_image(image: SpdkImage, layout: Path) -> None:
    """Its blobs, as they are, into another layout."""
    manifest, _ = read_image(image.layout, image.descriptor)
    for descriptor in (image.descriptor, manifest.config, *manifest.layers):
        shutil.copyfile(blob_path(image.layout, descriptor), blob_path(layout, descriptor))


def _layer_files(layout: Path, layer: Descriptor) -> Iterable[Entry]:
    assert layer.mediaType in LAYER_TYPES, "checked with the layout"
    with tarfile.open(blob_path(layout, layer)) as archive:
        for member in archive:
            name = member.name.removeprefix("./").strip("/")
            if name.rpartition("/")[2] == PROGRAM and member.isreg():
                content = archive.extractfile(member)
                assert content is not None
                yield Entry(name, stat.S_IFREG | member.mode, data=content.read(_ELF_MACHINE_AT + 2))


def _program(entries: Iterable[Entry], architecture: Architecture, where: str) -> str | None:
    """Path of nvmf_tgt; None: it is not there. Raises BuildError where it would not run."""
    for entry in entries:
        if entry.path.rpartition("/")[2] != PROGRAM or not stat.S_ISREG(entry.mode) or not entry.mode & 0o111:
            continue
        machine = entry.data[:4] == b"\x7fELF" and struct.unpack_from("<H", entry.data, _ELF_MACHINE_AT)[0]
        if machine != architecture.elf_machine:
            raise BuildError(
                f"{where}: its {PROGRAM} is no program for {architecture.machine}",
                next_step=f"Name one that was built for {architecture.machine}.",
            )
        return f"/{entry.path}"
    return None


def _no_program(option: str, where: str) -> BuildError:
    return BuildError(
        f"{option} {where}: there is no program {PROGRAM} in it",
        next_step="Name what was built with SPDK's target, or build with --target nvmet, which needs none.",
    )


def _check_dependencies(controls: Sequence[DebControl], there: dict[str, str]) -> None:
    versions = there | {control.name: control.version for control in controls}
    missing = [
        f"{control.name} needs {needed}"
        for control in controls
        for needed in control.depends
        if not any(_is_met(one.strip(), versions) for one in needed.split("|"))
    ]
    if missing:
        raise BuildError(
            f"--spdk-deb: the image has not all that it needs: {'; '.join(missing)}",
            next_step="Name these packages with --spdk-deb, too, or add them to the lock's roots: mfctl image lock "
            "--spdk-root NAME.",
        )


def _is_met(dependency: str, versions: dict[str, str]) -> bool:
    found = _DEPENDENCY.fullmatch(dependency)
    if found is None or found["name"] not in versions:
        return False
    if found["op"] is None:
        return True
    argv = ("dpkg", "--compare-versions", versions[found["name"]], found["op"], found["version"])
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0
