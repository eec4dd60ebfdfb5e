"""Wheels for another platform, by pip from where pip is configured to look. Nothing is built and nothing runs."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from meshfusion.tools.image.architecture import PYTHON, Architecture
from meshfusion.tools.image.commands import CommandFailedError, run_command
from meshfusion.tools.image.errors import BuildError, GoneError
from meshfusion.tools.image.lock import REMAKE, LockedPackage

_RESOLVE_S: Final = 600.0
_DOWNLOAD_S: Final = 1800.0
_NO_SUCH: Final = re.compile(r"No matching distribution found for (\S+)")
_CHANGED: Final = re.compile(r"DO NOT MATCH THE HASHES.*?^\s+(\S+) from ", re.DOTALL | re.MULTILINE)


def resolve_wheels(requirements: Sequence[str], architecture: Architecture) -> dict[str, tuple[str, str]]:
    """All that ``requirements`` need, by name: version and SHA-256 of the wheel. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="meshfusion-wheels-") as folder:
        report = Path(folder) / "report.json"
        _pip(
            "install", "--dry-run", "--ignore-installed", "--report", str(report), "--target", f"{folder}/none",
            *_platform(architecture), *requirements, about="resolving wheels", deadline_s=_RESOLVE_S,
        )  # fmt: skip
        found = json.loads(report.read_bytes())["install"]
    return {
        normal_name(entry["metadata"]["name"]): (
            entry["metadata"]["version"],
            entry["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for entry in found
    }


def download_wheels(packages: Sequence[LockedPackage], architecture: Architecture, directory: Path) -> dict[str, Path]:
    """Their files, in ``directory``, by SHA-256. Raises GoneError for what is not there with that digest."""
    listed = directory / "requirements.txt"
    listed.write_text("".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in packages))
    try:
        _pip(
            "download", "--no-deps", "--require-hashes", "-r", str(listed), "-d", str(directory),
            *_platform(architecture), about="fetching wheels", deadline_s=_DOWNLOAD_S,
        )  # fmt: skip
    except CommandFailedError as error:
        missing, changed = _NO_SUCH.search(error.said), _CHANGED.search(error.said)
        if missing is not None:
            problem = f"there is no wheel any more that the lock names: {missing[1]}"
        elif changed is not None:
            problem = f"the wheel of {changed[1]} that is there is not the one that the lock names"
        else:
            raise
        raise GoneError(
            problem,
            next_step=REMAKE.format(architecture=architecture.debian),
        ) from None
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in directory.glob("*.whl")}


def normal_name(name: str) -> str:
    """As PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _platform(architecture: Architecture) -> list[str]:
    platforms = [word for tag in architecture.wheel_platforms for word in ("--platform", tag)]
    return ["--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON, *platforms]


def _pip(*arguments: str, about: str, deadline_s: float) -> None:
    argv = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments)
    try:
        run_command(argv, about=about, deadline_s=deadline_s)
    except CommandFailedError as error:
        if "No module named pip" in error.said:
            raise BuildError(
                f"{about}: this Python has no pip", next_step=f"Install it: {sys.executable} -m ensurepip"
            ) from None
        raise
