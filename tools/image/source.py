"""The commit of this repository that an image is made from. Its files come out of git, never from the work tree."""

from __future__ import annotations

import io
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshfusion.tools.image.commands import CommandFailedError, run_command
from meshfusion.tools.image.errors import BuildError
from meshfusion.tools.image.tree import FILE, Entry, text_file
from meshfusion.tools.image.wheel_content import INTERPRETER, SITE

UNITS: Final = ("jbof", "dpu", "host", "tools")
LOCKS: Final = "tools/data/image"
_GIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Source:
    """``time_s``: of the commit, in seconds since 1970; what SOURCE_DATE_EPOCH stands for. ``files``: by path."""

    commit: str
    time_s: int
    files: dict[str, Entry]

    @property
    def project(self) -> dict[str, Any]:
        """The table of that name in pyproject.toml."""
        table: dict[str, Any] = tomllib.loads(self.files["pyproject.toml"].data.decode())["project"]
        return table

    @property
    def version(self) -> str:
        """Of the project, with the commit behind it: two commits are two versions (PEP 440)."""
        return f"{self.project['version']}+g{self.commit[:12]}"

    def lock_data(self, architecture: str) -> bytes | None:
        """The committed lock of ``architecture``."""
        entry = self.files.get(f"{LOCKS}/{architecture}.json")
        return None if entry is None else entry.data


def read_source(root: Path, revision: str) -> Source:
    """Raises BuildError where ``root`` is no checkout, or has no such commit."""
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()
        time_s = int(_git(root, "show", "-s", "--format=%ct", commit))
        archive = _git(root, "archive", "--format=tar", commit, "--", *UNITS, "pyproject.toml", "LICENSE")
    except CommandFailedError:
        raise BuildError(
            f"{root}: there is no commit {revision} of MeshFusion there",
            next_step="Build from a checkout of the repository (--source FOLDER) and a commit of it (--commit).",
        ) from None
    return Source(commit, time_s, {entry.path: entry for entry in _entries(archive, time_s)})


def is_changed(root: Path) -> bool:
    """Does the work tree have changes that are in no commit?"""
    return bool(_git(root, "status", "--porcelain", "--", *UNITS, "pyproject.toml").strip())


def source_entries(source: Source, version: str) -> Iterator[Entry]:
    """The project as if it were installed, as ``version``, with its two programs."""
    for path, entry in source.files.items():
        if path.partition("/")[0] in UNITS:
            yield Entry(f"{SITE}/meshfusion/{path}", entry.mode, data=entry.data, time_s=entry.time_s)
    info = f"{SITE}/meshfusion-{version.replace('-', '_')}.dist-info"
    for place, text in (
        (f"{info}/METADATA", f"Metadata-Version: 2.1\nName: meshfusion\nVersion: {version}\n"),
        (f"{info}/INSTALLER", "mfctl image build\n"),
        (f"{info}/licenses/LICENSE", source.files["LICENSE"].data.decode()),
    ):
        yield _timed(text_file(place, text), source.time_s)
    for name, target in source.project["scripts"].items():
        module, _, function = target.partition(":")
        text = f"#!{INTERPRETER}\nfrom {module} import {function}\n\n{function}()\n"
        yield _timed(text_file(f"usr/local/bin/{name}", text, 0o755), source.time_s)


def _timed(entry: Entry, time_s: int) -> Entry:
    return Entry(entry.path, entry.mode, data=entry.data, time_s=time_s)


def _entries(archive: bytes, time_s: int) -> Iterator[Entry]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            content = members.extractfile(member) if member.isreg() else None
            if content is not None:
                # git archive's modes follow a setting (tar.umask); only the executable bit is the commit's.
                mode = FILE | (0o755 if member.mode & 0o100 else 0o644)
                yield Entry(member.name, mode, data=content.read(), time_s=time_s)


def _git(root: Path, *arguments: str) -> bytes:
    argv = ("git", "-C", str(root), *arguments)
    return run_command(argv, about=f"reading {root}", deadline_s=_GIT_S, install="git")
