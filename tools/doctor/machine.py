"""The machine as its files show it, below a root that tests replace."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from meshfusion.tools.mfctl.findings import Finding, State

_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP)
"""The kernel's ways of saying that an attribute has no value here: some exist and cannot be read (EINVAL)."""
_CONTAINER_MARKS: Final = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")


class UnseenError(Exception):
    """Something may be there, and is not shown to this process. ``remedy``: how it can be seen."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


class Machine:
    """``root``: of the filesystem with ``proc``, ``sys`` and the rest. Paths are relative to it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    @property
    def sysfs(self) -> Path:
        return self.root / "sys"

    def text(self, path: str) -> str | None:
        """Without the white space around it; None where there is none. Raises UnseenError where it is kept from us."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise _kept(path, error) from None

    def number(self, path: str) -> int | None:
        text = self.text(path)
        return int(text) if text is not None and text.lstrip("-").isdecimal() else None

    def lines(self, path: str) -> list[str]:
        return (self.text(path) or "").splitlines()

    def has(self, path: str) -> bool:
        try:
            (self.root / path).stat()
        except OSError as error:
            if error.errno in _NOT_THERE:
                return False
            raise _kept(path, error) from None
        return True

    def names(self, folder: str) -> list[str]:
        """Sorted; none where there is no such folder."""
        try:
            return sorted(os.listdir(self.root / folder))
        except OSError as error:
            if error.errno in _NOT_THERE:
                return []
            raise _kept(folder, error) from None

    def target(self, link: str) -> Path | None:
        """What a link leads to in the end; None where there is none."""
        path = self.root / link
        return path.resolve() if path.exists() else None

    @property
    def is_container(self) -> bool:
        """Then what is not shown may be there all the same."""
        return any((self.root / mark).exists() for mark in _CONTAINER_MARKS)

    def need(self, folder: str, what: str) -> None:
        """Raises UnseenError where ``folder``, in which ``what`` would be seen, is not shown at all."""
        if not self.has(folder):
            raise UnseenError(f"{what}: /{folder} is not there", f"Run it where /{folder} is mounted: on the host.")

    def refuse_absence(self, what: str) -> None:
        """Raises UnseenError in a container, where "there is none" would be a guess."""
        if self.is_container:
            raise UnseenError(f"{what}: none is shown in this container", "Run it on the host, or give it the devices.")


def _kept(path: str, error: OSError) -> UnseenError:
    return UnseenError(f"/{path} cannot be read: {error.strerror}", "Run mfctl doctor as root.")


def seen(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of ``look``, which may raise UnseenError at any of them."""
    try:
        yield from look()
    except UnseenError as error:
        yield Finding(check, State.UNSEEN, error.cause, error.remedy)
