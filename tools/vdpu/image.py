"""The BFB of a virtual card: a system of Debian packages with its installer, in the boot stream's format; cached."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from meshfusion.dpu.image.bfb import BL2_IMAGE_ID, BfbImage, make_bfb
from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.host_steps import only_one
from meshfusion.tools.lab.packages import ensure_packages
from meshfusion.tools.lab.progress import Note
from meshfusion.tools.lab.tcg_image import ArchiveEntry, cpio_archive
from meshfusion.tools.vdpu import hardware, kernel, packages, system_files, tree
from meshfusion.tools.vdpu.stream_parts import INITRAMFS_ID, KERNEL_ID

RECIPE: Final = 1
"""Increase when what this makes of the packages changes, and no file of it does."""
BFB: Final = "virtual-dpu.bfb"
_BL2: Final = b"A virtual card has no boot firmware of its own: QEMU and its UEFI stand in for it.\n"
_BLUEFIELD_3: Final = 2
_WAIT_S: Final = 3600.0
_SCRIPTS: Final = ("install.sh", "bfrshlog", "boot_init.sh")


def prepared_bfb(cache: Path, note: Note) -> Path:
    """From ``cache``, or made now from the packages that there are. Raises LabError."""
    ensure_packages(packages.HOST, note)
    cache.mkdir(parents=True, exist_ok=True)
    with only_one(cache / "lock", note, _WAIT_S):
        try:
            files = packages.fetched(cache / "packages", note)
        except LabError as error:
            return _kept(cache, error, note)
        folder = cache / f"{_packages_key(files)}-{recipe_key()}"
        if not (folder / BFB).exists():
            note("the virtual card's system: putting it together")
            with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as work:
                made = Path(work) / "made"
                made.mkdir()
                (made / BFB).write_bytes(bfb_of(files))
                made.rename(folder)
    return folder / BFB


def _kept(cache: Path, error: LabError, note: Note) -> Path:
    """The newest one that was made in the same way, when there are no packages to be had. Raises ``error``."""
    kept = sorted(cache.glob(f"*-{recipe_key()}/{BFB}"), key=lambda path: path.stat().st_mtime)
    if not kept:
        raise error
    note(f"taking the one of before: {error.message}")
    return kept[-1]


def recipe_key() -> str:
    """Of what we do with the packages: another script of ours makes another system."""
    digest = hashlib.sha256(f"{RECIPE}\n".encode())
    for module in (hardware, kernel, packages, system_files, tree):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    for script in _SCRIPTS:
        digest.update(system_files.system_script(script).encode())
    return digest.hexdigest()[:8]


def _packages_key(files: Iterable[Path]) -> str:
    return hashlib.sha256("\n".join(sorted(file.name for file in files)).encode()).hexdigest()[:16]


def bfb_of(files: Iterable[Path]) -> bytes:
    """The stream, from the packages. The initramfs is the system itself, with the installer for its process 1."""
    content = tree.unpacked(files)
    image = kernel.image_of(content)
    content = kernel.with_modules(content)
    boot = kernel.boot_initramfs(content, system_files.system_script("boot_init.sh"))
    content = {path: node for path, node in content.items() if not path.startswith("boot/")}
    content = tree.laid_over(content, system_files.system_files(content))
    content = tree.laid_over(content, {
        **system_files.installer_files(),
        "installer/initrd.img": tree.file(boot),
        "installer/vmlinuz": tree.file(image),
        "installer/cmdline": tree.file(" ".join(hardware.KERNEL_ARGUMENTS)),
    })  # fmt: skip
    entries = [*tree.entries(content), ArchiveEntry("dev/console", 0o20600, device=(5, 1))]
    return make_bfb((
        BfbImage(BL2_IMAGE_ID, _BLUEFIELD_3, _BL2),
        BfbImage(KERNEL_ID, 0, image),
        BfbImage(INITRAMFS_ID, 0, cpio_archive(entries)),
    ))  # fmt: skip
