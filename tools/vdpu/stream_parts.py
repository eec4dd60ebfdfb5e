"""What a virtual card takes out of the stream that was pushed into it: kernel, initramfs, and what follows the BFB."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from meshfusion.dpu.image.bfb import HEADER_BYTES, BfbPart, scan_bfb
from meshfusion.dpu.image.errors import BfbError
from meshfusion.tools.lab.tcg_image import ArchiveEntry, cpio_archive

KERNEL_ID: Final = 62
INITRAMFS_ID: Final = 63
BF_CFG_PLACE: Final = "etc/bf.cfg"


@dataclass(frozen=True, slots=True)
class PushedStream:
    """``bfb_bytes``: where ``bf.cfg`` begins."""

    kernel: BfbPart
    initramfs: BfbPart
    bfb_bytes: int
    bf_cfg: bytes


def end_of_bfb(file: BinaryIO) -> int | None:
    """Behind its last image, which says that none follows; None when not all of it is there."""
    size = file.seek(0, io.SEEK_END)
    offset = 0
    while offset + HEADER_BYTES <= size:
        file.seek(offset)
        header = file.read(HEADER_BYTES)
        length = int.from_bytes(header[8:12], "little")
        following = int.from_bytes(header[16:24], "little")
        offset += HEADER_BYTES + length + -length % 8
        if not following:
            return offset if offset <= size else None
    return None


def taken_apart(path: Path) -> PushedStream | None:
    """None when the stream is not whole. Raises BfbError for one that is no BFB, or that this card cannot boot."""
    with path.open("rb") as file:
        end = end_of_bfb(file)
        if end is None:
            return None
        file.seek(end)
        bf_cfg = file.read()
        file.seek(0)
        summary = scan_bfb(cast(BinaryIO, _Bounded(file, end)))
    by_id = {part.image_id: part for part in summary.parts}
    if KERNEL_ID not in by_id or INITRAMFS_ID not in by_id:
        raise BfbError(0, f"it has no kernel (image {KERNEL_ID}) and initramfs (image {INITRAMFS_ID}) to boot")
    return PushedStream(by_id[KERNEL_ID], by_id[INITRAMFS_ID], end, bf_cfg)


def write_boot_files(path: Path, stream: PushedStream, kernel: Path, initrd: Path) -> None:
    """What the firmware would hand over: the kernel, and the initramfs with ``bf.cfg`` in it."""
    with path.open("rb") as file:
        kernel.write_bytes(_body(file, stream.kernel))
        more = [ArchiveEntry(BF_CFG_PLACE, 0o100600, stream.bf_cfg)] if stream.bf_cfg else []
        initrd.write_bytes(_body(file, stream.initramfs) + cpio_archive(more))


def _body(file: BinaryIO, part: BfbPart) -> bytes:
    file.seek(part.offset_bytes + HEADER_BYTES)
    return file.read(part.length_bytes)


class _Bounded(io.RawIOBase):
    """The first ``left`` bytes of ``file``."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file, self._left = file, left

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data
