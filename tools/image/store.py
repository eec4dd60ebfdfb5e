"""Packages that were fetched, kept under their digests, so that a second build fetches nothing."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshfusion.tools.image.architecture import Architecture
from meshfusion.tools.image.debian_source import DebianSource
from meshfusion.tools.image.errors import GoneError
from meshfusion.tools.image.lock import REMAKE, LockedPackage
from meshfusion.tools.image.wheel_source import download_wheels

Fetch = Callable[[Sequence[LockedPackage], Path], Mapping[str, Path]]


@dataclass(frozen=True, slots=True)
class PackageStore:
    """``folder``: of files that are named by their SHA-256, and of apt's root. ``sources``: of apt, see
    :class:`~meshfusion.tools.image.debian_source.DebianSource`."""

    folder: Path
    architecture: Architecture
    sources: Path | None = None

    def debs(self, packages: Sequence[LockedPackage]) -> list[tuple[LockedPackage, Path]]:
        """Each with its file. Raises BuildError."""
        return self._kept(packages, self._fetch_debs)

    def wheels(self, packages: Sequence[LockedPackage]) -> list[tuple[LockedPackage, Path]]:
        """Each with its file. Raises BuildError."""
        return self._kept(packages, lambda missing, into: download_wheels(missing, self.architecture, into))

    @property
    def debian(self) -> DebianSource:
        return DebianSource(self.folder / "apt" / self.architecture.debian, self.architecture, self.sources)

    def _fetch_debs(self, missing: Sequence[LockedPackage], directory: Path) -> Mapping[str, Path]:
        self.debian.update()
        return self.debian.download(missing, directory)

    def _kept(self, packages: Sequence[LockedPackage], fetch: Fetch) -> list[tuple[LockedPackage, Path]]:
        files = self.folder / "files"
        files.mkdir(parents=True, exist_ok=True)
        missing = [package for package in packages if not _is_whole(files / package.sha256, package.sha256)]
        if missing:
            with tempfile.TemporaryDirectory(prefix="fetching-", dir=self.folder) as work:
                found = fetch(missing, Path(work))
                for package in missing:
                    if package.sha256 not in found:
                        raise GoneError(
                            f"{package.name} {package.version} as it is fetched has another digest than in the lock",
                            next_step=REMAKE.format(architecture=self.architecture.debian),
                        )
                    os.replace(found[package.sha256], files / package.sha256)
        return [(package, files / package.sha256) for package in packages]


def _is_whole(path: Path, sha256: str) -> bool:
    """What lies in a cache may have been cut short or changed; reading it again costs less than an image that is not
    what its lock says."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False
