"""Pages of a drive through Linux' driver: admin commands over ``/dev/nvmeN``."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshfusion.jbof.drives.pages import CSI_NVM, PageReader
from meshfusion.jbof.drives.system.ioctls import NVME_ADMIN, PassthruResult, nvme_passthru
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.admin_commands import IDENTIFY_BYTES
from meshfusion.jbof.nvme.command import AdminOpcode
from meshfusion.jbof.nvme.fields import MAX_U16
from meshfusion.jbof.nvme.status import NvmeCommandError, decode_status

_NSID_ALL: Final = 0xFFFFFFFF


@contextlib.contextmanager
def opened_controller(device: Path) -> Iterator[PageReader]:
    """``device``: of a controller, such as ``/dev/nvme0``. Raises :class:`~meshfusion.jbof.errors.MediaError`."""
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        step = (
            "Run this as root, or with CAP_SYS_ADMIN: admin commands need it."
            if error.errno in (errno.EACCES, errno.EPERM)
            else "Look at the kernel's log for what became of the drive."
        )
        raise MediaError(f"{device} cannot be opened: {error.strerror}", next_step=step) from error
    try:
        yield IoctlPages(fd, str(device))
    finally:
        os.close(fd)


class IoctlPages:
    """A :class:`~meshfusion.jbof.drives.pages.PageReader` over an open controller device."""

    def __init__(self, fd: int, where: str) -> None:
        self._fd = fd
        self._where = where

    def identify(self, cns: int, *, nsid: int = 0, csi: int = CSI_NVM) -> bytes:
        return self._admin(AdminOpcode.IDENTIFY, nsid, (cns, csi << 24), IDENTIFY_BYTES).data

    def log_page(self, page: int, length_bytes: int, *, nsid: int = _NSID_ALL, group: int = 0) -> bytes:
        assert length_bytes % 4 == 0
        dwords = length_bytes // 4 - 1  # 0's based (Base Figure 198)
        words = ((dwords & MAX_U16) << 16 | page, group << 16 | dwords >> 16)
        return self._admin(AdminOpcode.GET_LOG_PAGE, nsid, words, length_bytes).data

    def feature(self, feature: int, *, group: int = 0) -> int:
        return self._admin(AdminOpcode.GET_FEATURES, 0, (feature, group), 0).result

    def _admin(self, opcode: AdminOpcode, nsid: int, dwords: tuple[int, ...], read_bytes: int) -> PassthruResult:
        try:
            done = nvme_passthru(self._fd, NVME_ADMIN, opcode.value, nsid=nsid, dwords=dwords, read_bytes=read_bytes)
        except OSError as error:
            raise MediaError(
                f"{self._where}: the driver refused {opcode.name}: {error.strerror}",
                next_step="Run this as root; if it is a drive that fails, see the kernel's log.",
            ) from error
        if done.status:
            raise NvmeCommandError(decode_status(done.status << 1), opcode, where=self._where)
        return done
