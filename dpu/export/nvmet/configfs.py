"""The few operations on configfs that a target needs, at a root that tests choose."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from meshfusion.dpu.export.errors import StepRefusedError, TargetUnreachableError

ROOT = Path("/sys/kernel/config/nvmet")

_Result = TypeVar("_Result")


class ConfigFs(Protocol):
    """Paths are relative to the root, such as ``hosts/nqn.…``.

    All raise :class:`~meshfusion.dpu.export.errors.StepRefusedError` with the kernel's errno as code.
    """

    def entries(self, folder: str) -> frozenset[str]:
        """Names in the folder; none if it does not exist."""

    def read(self, path: str) -> str:
        """An attribute, without the line's end."""

    def write(self, path: str, text: str) -> None:
        """An attribute. Can block for as long as the kernel likes."""

    def hide(self, path: str) -> None:
        """An attribute, from all but its owner, for as long as its folder is there."""

    def make(self, folder: str) -> None: ...

    def remove(self, folder: str) -> None: ...

    def link(self, path: str, to: str) -> None: ...

    def unlink(self, path: str) -> None: ...


class KernelConfigFs:
    """The real one."""

    def __init__(self, root: Path = ROOT) -> None:
        """Raises :class:`~meshfusion.dpu.export.errors.TargetUnreachableError` where there is no nvmet, or not for this
        user."""
        if not root.is_dir():
            raise TargetUnreachableError(
                f"{root} does not exist",
                next_step="mount configfs and load the kernel modules nvmet and nvmet-tcp or nvmet-rdma",
            )
        if not os.access(root, os.W_OK | os.X_OK):
            raise TargetUnreachableError(
                f"{root} may not be changed by user {os.geteuid()}",
                next_step="run the service as root, which the kernel's target needs",
            )
        self._root = root

    def entries(self, folder: str) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._root / folder))
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise refused("list", folder, error) from error

    def read(self, path: str) -> str:
        return self._do("read", path, lambda there: there.read_text().rstrip("\n"))

    def write(self, path: str, text: str) -> None:
        def write(there: Path) -> None:
            # One write(2): each one is a value of its own. Never O_CREAT: a misspelt name is no attribute.
            descriptor = os.open(there, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)

        self._do(f"write {text[:40]!r} to" if not path.endswith("_key") else "write a key to", path, write)

    def hide(self, path: str) -> None:
        self._do("hide", path, lambda there: there.chmod(0o600))

    def make(self, folder: str) -> None:
        self._do("make", folder, lambda there: there.mkdir())

    def remove(self, folder: str) -> None:
        self._do("remove", folder, lambda there: there.rmdir())

    def link(self, path: str, to: str) -> None:
        self._do("link", path, lambda there: there.symlink_to(self._root / to))

    def unlink(self, path: str) -> None:
        self._do("unlink", path, lambda there: there.unlink())

    def _do(self, what: str, path: str, operation: Callable[[Path], _Result]) -> _Result:
        try:
            return operation(self._root / path)
        except OSError as error:
            raise refused(what, path, error) from error


def refused(what: str, path: str, error: OSError) -> StepRefusedError:
    return StepRefusedError(
        f"the kernel refused to {what} {path}: {error.strerror}",
        code=error.errno or 0,
        next_step="see the kernel's log; MeshFusion needs root, and alone changes subsystems of its NQN prefix",
    )
