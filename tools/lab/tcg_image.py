"""The distribution's kernel for the emulated machine: its image unpacked, its modules, an initramfs of ours."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.debian import download, kernel_image, remembered
from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.host_steps import Steps, only_one
from meshfusion.tools.lab.machine import boot_script
from meshfusion.tools.lab.progress import Note

RECIPE: Final = 1
"""Increase when what this module makes of a package changes."""

_ROOT_MODULES: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console")
_BUSYBOX: Final = Path("/bin/busybox")
_WAIT_S: Final = 1800.0
_STEP_DEADLINE_S: Final = 300.0
_XZ_MAGIC: Final = b"\xfd7zXZ\0"
_CHARACTER_DEVICE, _DIRECTORY, _FILE = 0o20600, 0o40755, 0o100755


@dataclass(frozen=True, slots=True)
class TcgImage:
    """``modules``: the folder that is ``/lib/modules/<release>`` in the guest."""

    kernel: Path
    initrd: Path
    modules: Path


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """One file of a cpio archive. ``device``: major and minor number."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def prepared_image(cache: Path, architecture: str, note: Note) -> TcgImage:
    """From ``cache``, or made now from ``linux-image-ARCHITECTURE``. Raises LabError."""
    cache.mkdir(parents=True, exist_ok=True)
    try:
        package = remembered(cache / "image.json", lambda: kernel_image(architecture, note))
    except LabError:
        kept = sorted((f for f in cache.glob(f"*-{recipe_key()}") if f.is_dir()), key=lambda f: f.stat().st_mtime)
        if not kept:
            raise
        return image_in(kept[-1])
    folder = cache / f"{package.name}_{package.version}-{recipe_key()}".replace(":", "%")
    with only_one(cache / "lock", note, _WAIT_S):
        if not folder.exists():
            steps = Steps("the emulated machine's kernel", cache / "prepare.log", note)
            steps.log.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as work:
                content = Path(work) / "content"
                argv = ["dpkg-deb", "-x", str(download(package, Path(work), steps)), str(content)]
                steps.run("unpacking", argv, directory=Path(work), deadline_s=_STEP_DEADLINE_S)
                prepare(content, steps)
                content.rename(folder)
    return image_in(folder)


def recipe_key() -> str:
    """Of what is put into the initramfs: another init script is another image."""
    return hashlib.sha256(f"{RECIPE}\n{boot_script('tcg_init.sh')}".encode()).hexdigest()[:8]


def image_in(folder: Path) -> TcgImage:
    return TcgImage(folder / "vmlinux", folder / "initrd", next((folder / "modules").iterdir()))


def prepare(content: Path, steps: Steps) -> None:
    """In the unpacked package: vmlinux (QEMU starts it faster than the compressed image), initrd, modules/RELEASE."""
    libraries = content / "lib" if (content / "lib").exists() else content / "usr" / "lib"
    release = next((libraries / "modules").iterdir()).name
    if not (libraries / "modules" / release / "modules.dep.bin").exists():
        argv = ["depmod", "-b", str(libraries.parent), release]
        steps.run("listing modules", argv, directory=content, deadline_s=_STEP_DEADLINE_S)
    vmlinux = unpacked_kernel((content / "boot" / f"vmlinuz-{release}").read_bytes())
    if vmlinux is None:
        raise steps.failure("unpacking the kernel", "it is not compressed with xz")
    (content / "vmlinux").write_bytes(vmlinux)
    modules = [read_module(path) for path in needed_modules(libraries.parent, release)]
    (content / "initrd").write_bytes(initramfs(modules))
    (libraries / "modules").rename(content / "modules")
    for name in ("boot", "lib", "usr"):
        shutil.rmtree(content / name, ignore_errors=True)


def unpacked_kernel(image: bytes) -> bytes | None:
    """The ELF file in a bzImage, which holds it as an xz stream somewhere."""
    at = -1
    while (at := image.find(_XZ_MAGIC, at + 1)) >= 0:
        try:
            payload = lzma.LZMADecompressor().decompress(image[at:])
        except lzma.LZMAError:
            continue
        if payload.startswith(b"\x7fELF"):
            return payload
    return None


def needed_modules(base: Path, release: str) -> list[Path]:
    """The files of what mounts the root, each behind those that it depends on."""
    found: dict[Path, None] = {}
    for module in _ROOT_MODULES:
        argv = ["modprobe", "-d", str(base), "-S", release, "--show-depends", module]
        environment = {**os.environ, "PATH": f"/usr/sbin:/sbin:{os.environ.get('PATH', '')}"}
        lines = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        found |= dict.fromkeys(Path(line.split()[1]) for line in lines if line.startswith("insmod "))
    return list(found)


def read_module(path: Path) -> tuple[str, bytes]:
    """Its name without the compression's ending, and its content without the compression."""
    data = path.read_bytes()
    return (path.stem, lzma.decompress(data)) if path.suffix == ".xz" else (path.name, data)


def initramfs(modules: Iterable[tuple[str, bytes]]) -> bytes:
    """busybox, our init, and the modules with the order to load them in."""
    modules = list(modules)
    return cpio_archive(
        [
            *(ArchiveEntry(name, _DIRECTORY) for name in ("bin", "proc", "sys", "dev", "modules")),
            ArchiveEntry("dev/console", _CHARACTER_DEVICE, device=(5, 1)),
            ArchiveEntry("bin/busybox", _FILE, _BUSYBOX.read_bytes()),
            *(ArchiveEntry(f"modules/{name}", _FILE, data) for name, data in modules),
            ArchiveEntry("modules/order", _FILE, "".join(f"{name}\n" for name, _ in modules).encode()),
            ArchiveEntry("init", _FILE, boot_script("tcg_init.sh").encode()),
        ]
    )


def cpio_archive(entries: Iterable[ArchiveEntry]) -> bytes:
    """The "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst of Linux)."""
    archive = io.BytesIO()
    for inode, entry in enumerate((*entries, ArchiveEntry("TRAILER!!!", 0)), start=1):
        name = entry.name.encode() + b"\0"
        numbers = (inode, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
        archive.write(b"070701" + b"".join(b"%08X" % number for number in numbers) + name)
        archive.write(bytes(-archive.tell() % 4))
        archive.write(entry.data)
        archive.write(bytes(-archive.tell() % 4))
    return archive.getvalue()
