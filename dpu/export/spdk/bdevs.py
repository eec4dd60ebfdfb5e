"""The aio bdevs through which an SPDK reaches a pool's drives: made, found stale, and taken away."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.export.desired import Namespace
from meshfusion.dpu.export.errors import ExportError, StepRefusedError
from meshfusion.dpu.export.spdk.rate_limits import RateLimits, keep_limits
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES

logger = logging.getLogger("meshfusion.exports")

# Of bdevs, SPDK answers with the negative errno.
_EXISTS: Final = -17
_IS_NOT_THERE: Final = -19
_CALL_S: Final = 20.0
_OPENED: Final = uuid.UUID("6c0f4ee5-1b6e-4ac4-8a39-0d5c6f0a2f31")


def make_bdev(limits: RateLimits | None, rpc: SpdkRpc, namespace: Namespace) -> None:
    """The aio bdev of the namespace's file, where it has one, and what may be asked of it. Idempotent.

    A bdev of that name that has something else open than what lies at the file's path is made anew: the drive went and
    came back, or lies elsewhere, while nobody looked, and what hosts write would go to somebody else's or to nowhere.
    Where namespaces show such a bdev, SPDK takes them out with it, which waits for what is in flight
    (lib/nvmf/subsystem.c, nvmf_ns_hot_remove).
    """
    if namespace.file:
        _make(rpc, namespace.backing, Path(namespace.file))
    if limits is not None:
        keep_limits(rpc, [namespace.backing], limits)


def drop_bdev(rpc: SpdkRpc, backing: str) -> None:
    """A bdev that :func:`make_bdev` made, of a drive that is shown to nobody any more: what it has open is the drive as
    it was, which may come back as another device, or go to somebody else. Answered when nothing is under way there."""
    try:
        rpc.call("bdev_aio_delete", _CALL_S, name=backing)
    except StepRefusedError as error:
        if error.code != _IS_NOT_THERE:
            raise


def keep_bdev(rpc: SpdkRpc, backing: str) -> None:
    """It has a name that the configuration says: others made it, and others take it away."""


def opened_as(name: str, file: Path) -> str:
    """The UUID of a bdev of this name that has opened what lies at ``file`` now.

    Files, and device nodes as Linux makes them (devtmpfs), have an inode each, whose number is not given to another one
    while the first is open. So a bdev with this UUID has that very file or device open.

    Raises :class:`~meshfusion.dpu.export.errors.ExportError`.
    """
    try:
        found = file.stat()
    except OSError as error:
        raise ExportError(
            f"{file} cannot be shown: {error.strerror}", next_step="plug the drive in, or remove it: mfctl jbof drives"
        ) from error
    return str(uuid.uuid5(_OPENED, f"{name} {found.st_dev} {found.st_ino} {found.st_rdev}"))


def _make(rpc: SpdkRpc, name: str, file: Path) -> None:
    """``fallocate``: so that deallocating reaches the file."""
    wanted = opened_as(name, file)
    options = {"filename": str(file), "block_size": LBA_BYTES, "fallocate": True, "uuid": wanted}
    try:
        rpc.call("bdev_aio_create", _CALL_S, name=name, **options)
        return
    except StepRefusedError as error:
        if error.code != _EXISTS:
            raise
    if _uuid_of(rpc.call("bdev_get_bdevs", _CALL_S, name=name)) == wanted:
        return
    logger.warning("SPDK's bdev %s has something else open than %s: it is made anew", name, file)
    drop_bdev(rpc, name)
    rpc.call("bdev_aio_create", _CALL_S, name=name, **options)


def _uuid_of(answer: Any) -> str:
    try:
        (report,) = answer
        return str(report["uuid"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"SPDK reports a bdev in a form that is not known: {type(error).__name__} {error}",
            next_step="run a version of SPDK that this version of MeshFusion was tested with",
        ) from error


__all__ = ["drop_bdev", "keep_bdev", "make_bdev", "opened_as"]
