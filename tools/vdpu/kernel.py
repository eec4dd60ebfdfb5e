"""The kernel of a virtual card: of its modules those that a card needs, and the initramfs that finds its root."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.tcg_image import ArchiveEntry, cpio_archive
from meshfusion.tools.vdpu.tree import Tree, file, laid_over

MODULES: Final = (
    "autofs4", "configfs", "crc32_generic", "dm_crypt", "dm_mod", "ext4", "fuse", "ib_uverbs", "loop", "mmc_block",
    "nls_ascii", "nls_cp437", "null_blk", "nvme", "nvme_fabrics", "nvme_rdma", "nvme_tcp", "nvmet", "nvmet_rdma",
    "nvmet_tcp", "overlay", "rdma_rxe", "rdma_ucm", "sdhci_pci", "squashfs", "tun", "vfat", "virtio_blk",
    "virtio_console", "virtio_net", "virtio_pci", "virtio_rng",
)  # fmt: skip
_BOOT_MODULES: Final = ("virtio_pci", "virtio_console", "nvme", "mmc_block", "sdhci_pci", "virtio_blk", "ext4")
_FOLDER: Final = "usr/lib/modules"
_DEADLINE_S: Final = 120.0


def release_of(tree: Tree) -> str:
    return next(path.split("/")[3] for path in tree if path.startswith(f"{_FOLDER}/") and path.count("/") > 3)


def image_of(tree: Tree) -> bytes:
    return tree[f"boot/vmlinuz-{release_of(tree)}"].data


def with_modules(tree: Tree, names: Iterable[str] = MODULES) -> Tree:
    """``tree`` with those of its kernel modules that ``names`` need, and depmod's tables of them."""
    release = release_of(tree)
    prefix = f"{_FOLDER}/{release}/"
    rest = {path: node for path, node in tree.items() if not path.startswith(prefix)}
    with tempfile.TemporaryDirectory(prefix="meshfusion-modules-") as work:
        base = Path(work)
        folder = _written(tree, release, base)
        _depmod(base, release)
        needed = set(load_order(base, release, names))
        for module in folder.rglob("*.ko"):
            if module not in needed:
                module.unlink()
        _depmod(base, release)
        kept = {
            f"{prefix}{found.relative_to(folder)}": file(found.read_bytes())
            for found in sorted(folder.rglob("*"))
            if found.is_file()
        }
    return laid_over(rest, kept)


def boot_initramfs(tree: Tree, init: str) -> bytes:
    """Of the installed system: busybox, ``init``, and the modules that its root's drive needs."""
    release = release_of(tree)
    with tempfile.TemporaryDirectory(prefix="meshfusion-modules-") as work:
        base = Path(work)
        _written(tree, release, base)
        modules = [(module.name, module.read_bytes()) for module in load_order(base, release, _BOOT_MODULES)]
    return cpio_archive([
        *(ArchiveEntry(name, 0o40755) for name in ("bin", "proc", "sys", "dev", "root", "modules")),
        ArchiveEntry("dev/console", 0o20600, device=(5, 1)),
        ArchiveEntry("bin/busybox", 0o100755, tree["usr/bin/busybox"].data),
        *(ArchiveEntry(f"modules/{name}", 0o100644, data) for name, data in modules),
        ArchiveEntry("modules/order", 0o100644, "".join(f"{name}\n" for name, _ in modules).encode()),
        ArchiveEntry("init", 0o100755, init.encode()),
    ])  # fmt: skip


def _written(tree: Tree, release: str, base: Path) -> Path:
    """Its modules as files, for the programs that know about them; their folder."""
    prefix = f"{_FOLDER}/{release}/"
    folder = base / "lib" / "modules" / release
    for path, node in tree.items():
        if path.startswith(prefix) and node.data:
            target = folder / path.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(node.data)
    return folder


def load_order(base: Path, release: str, names: Iterable[str]) -> list[Path]:
    """Files of ``names`` under ``base``, each behind those that it depends on. What is built in has none."""
    found: dict[Path, None] = {}
    for name in names:
        argv = ("modprobe", "-d", str(base), "-S", release, "--show-depends", name)
        lines = _run(argv).splitlines()
        found |= dict.fromkeys(Path(line.split()[1]) for line in lines if line.startswith("insmod "))
    return list(found)


def _depmod(base: Path, release: str) -> None:
    _run(("depmod", "-b", str(base), release))


def _run(argv: tuple[str, ...]) -> str:
    environment = {**os.environ, "PATH": f"/usr/sbin:/sbin:{os.environ.get('PATH', '')}"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=_DEADLINE_S)
    return done.stdout
