"""Debian packages of any architecture, from the machine's own package sources, without touching the machine.

apt runs with a root of its own: lists, cache and an empty list of what is installed lie in a folder; sources, keys and
proxies are the machine's. So the distribution's own resolver decides, and apt checks signatures as it always does.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.image.architecture import DISTRIBUTION, SUITE, Architecture
from meshfusion.tools.image.commands import CommandFailedError, run_command
from meshfusion.tools.image.errors import BuildError, GoneError
from meshfusion.tools.image.lock import REMAKE, LockedPackage

_UPDATE_S: Final = 600.0
_RESOLVE_S: Final = 120.0
_DOWNLOAD_S: Final = 1800.0
_INSTALLED: Final = re.compile(r"^Inst (\S+) \((\S+) ", re.MULTILINE)
_GONE: Final = re.compile(r"^E: (?:Version '\S+' for '(\S+?)'|Unable to locate package (\S+?)(?:=|$))", re.MULTILINE)
# The newest of the suite, its updates and its security updates; nothing of others, whom the machine may trust as well.
_PREFERENCES: Final = f"""\
Package: *
Pin: release o={DISTRIBUTION},n={SUITE}*
Pin-Priority: 500

Package: *
Pin: release o=*
Pin-Priority: -1
"""


@dataclass(frozen=True, slots=True)
class DebianSource:
    """``folder``: apt's root, which is made where it is missing. ``sources``: a list of sources, or a file in deb822
    format that ends in ``.sources``; None: the machine's own."""

    folder: Path
    architecture: Architecture
    sources: Path | None = None

    def update(self) -> None:
        """Fetch the lists of packages. Raises BuildError."""
        self._prepare()
        try:
            self._run("apt-get", "update", "-q", about="fetching the package lists", deadline_s=_UPDATE_S)
        except CommandFailedError:
            # Sources of others may fail, as without packages for this architecture; ours is asked for next.
            if not self._has_suite():
                raise
        if not self._has_suite():
            raise BuildError(
                f"the package sources have no {DISTRIBUTION} {SUITE} for {self.architecture.debian}",
                next_step=f"Name a file with some of {DISTRIBUTION} {SUITE}: --apt-sources FILE",
            )

    def resolve(self, roots: Sequence[str]) -> dict[str, tuple[str, str]]:
        """All that ``roots`` need, by name: version and SHA-256. :meth:`update` comes before. Raises BuildError."""
        out = self._run(
            "apt-get", "-s", "install", "--no-install-recommends", *roots,
            about="resolving packages", deadline_s=_RESOLVE_S,
        )  # fmt: skip
        chosen = dict(_INSTALLED.findall(out))
        assert set(roots) <= chosen.keys(), (roots, sorted(chosen))
        named = [f"{name}={version}" for name, version in sorted(chosen.items())]
        shown = self._run("apt-cache", "show", *named, about="reading packages' digests", deadline_s=_RESOLVE_S)
        digests = dict(_digests(shown))
        return {name: (version, digests[name, version]) for name, version in sorted(chosen.items())}

    def download(self, packages: Sequence[LockedPackage], directory: Path) -> dict[str, Path]:
        """Their files, in ``directory``, by SHA-256. Raises GoneError for what is not there in that version."""
        named = [f"{package.name}={package.version}" for package in packages]
        try:
            self._run(
                "apt-get", "download", "-q", *named, about="fetching packages", deadline_s=_DOWNLOAD_S,
                directory=directory,
            )  # fmt: skip
        except CommandFailedError as error:
            gone = [first or second for first, second in _GONE.findall(error.said)]
            if not gone:
                raise
            versions = {package.name: package.version for package in packages}
            names = ", ".join(f"{name} {versions.get(name.partition(':')[0], '')}".strip() for name in gone)
            raise GoneError(
                f"the package sources have no longer what the lock names: {names}",
                next_step=REMAKE.format(architecture=self.architecture.debian),
            ) from None
        return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in directory.glob("*.deb")}

    def _has_suite(self) -> bool:
        policy = self._run("apt-cache", "policy", about="reading the package lists", deadline_s=_RESOLVE_S)
        wanted = rf"release .*o={DISTRIBUTION},.*n={SUITE},.*b={self.architecture.debian}\b"
        return re.search(wanted, policy) is not None

    def _prepare(self) -> None:
        for name in ("state/lists/partial", "cache/archives/partial", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "state" / "status").touch()
        (self.folder / "preferences").write_text(_PREFERENCES)
        (self.folder / "apt.conf").write_text(self._configuration())

    def _configuration(self) -> str:
        debian = self.architecture.debian
        lines = [
            f'Dir::State "{self.folder}/state";',
            f'Dir::State::status "{self.folder}/state/status";',
            f'Dir::Cache "{self.folder}/cache";',
            f'Dir::Etc::preferences "{self.folder}/preferences";',
            'Dir::Etc::preferencesparts "/dev/null";',
            f'APT::Architecture "{debian}";',
            f'APT::Architectures {{ "{debian}"; }};',
            'Acquire::Languages "none";',
        ]
        if self.sources is not None:
            lines += [f'Dir::Etc::sourcelist "{self.sources.absolute()}";', 'Dir::Etc::sourceparts "/dev/null";']
        if os.geteuid() == 0:
            lines.append('APT::Sandbox::User "root";')  # its own user could not write here
        return "\n".join(lines) + "\n"

    def _run(self, *argv: str, about: str, deadline_s: float, directory: Path | None = None) -> str:
        out = run_command(
            argv, about=about, deadline_s=deadline_s, directory=directory, install="apt",
            environment={"APT_CONFIG": str(self.folder / "apt.conf")},
        )  # fmt: skip
        return out.decode()


def _digests(shown: str) -> list[tuple[tuple[str, str], str]]:
    found = []
    for paragraph in shown.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if "SHA256" in fields:
            found.append(((fields["Package"], fields["Version"]), fields["SHA256"]))
    return found
