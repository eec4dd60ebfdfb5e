"""The User-Mode Linux kernel: built once from the distribution's source, kept by what it was built from.

A cached kernel is a folder ``<key>`` with ``linux`` (the executable), ``config`` (the whole configuration) and
``kernel.json`` (what it was built from). The key is a digest of the latter: another package version, another
``uml.config`` or another recipe below is another kernel.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import platform
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.debian import Package, download, kernel_source, remembered
from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.host_steps import Steps, build_environment, only_one
from meshfusion.tools.lab.kernel_changes import SourceChangeError, apply_changes
from meshfusion.tools.lab.packages import UML_BUILD, ensure_packages
from meshfusion.tools.lab.progress import Note

RECIPE: Final = 2
"""Increase when what this module does to the source changes."""

KERNEL_VARIABLE: Final = "MESHFUSION_LAB_KERNEL"
_BUILD_DEADLINE_S: Final = 3600.0
_STEP_DEADLINE_S: Final = 600.0
_BUILD_BYTES: Final = 3 << 30

_UNUSED_SOURCE: Final = (
    "*/Documentation/[a-z]*/*",
    "*/drivers/gpu/drm/*/*.[ch]",
    "*/drivers/net/ethernet/*/*.[ch]",
    "*/drivers/net/wireless/*/*.[ch]",
    "*/sound/*/*.c",
    "*/tools/testing/*",
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a kernel is built from."""

    package: str
    version: str
    config_sha256: str
    architecture: str
    recipe: int = RECIPE

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def config_fragment() -> str:
    return (importlib.resources.files("meshfusion.tools.lab") / "uml.config").read_text()


def origin_of(package: Package, fragment: str, architecture: str) -> Origin:
    return Origin(package.name, package.version, hashlib.sha256(fragment.encode()).hexdigest(), architecture)


def uml_kernel(cache: Path, note: Note) -> Path:
    """The executable for this machine, from ``cache`` or built now, which takes some minutes. Raises LabError."""
    named = os.environ.get(KERNEL_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise LabError(f"{KERNEL_VARIABLE}={named} is not an executable", next_step="name another one, or none")
        return Path(named).absolute()
    fragment, architecture = config_fragment(), platform.machine()
    if architecture != "x86_64":
        raise LabError(f"User-Mode Linux runs on x86-64 only, not on {architecture}", next_step="use such a machine")
    try:
        package = remembered(cache / "source.json", lambda: kernel_source(note))
    except LabError:
        # Without package lists (a bare container image) a kernel of the same configuration does.
        if (kept := newest_kept(cache, fragment)) is None:
            raise
        return kept
    origin = origin_of(package, fragment, architecture)
    kernel = cache / origin.key / "linux"
    if kernel.exists():
        return kernel
    ensure_packages(UML_BUILD, note)
    with only_one(cache / "lock", note, _BUILD_DEADLINE_S):
        if not kernel.exists():
            build(package, origin, fragment, cache, note)
    return kernel


def newest_kept(cache: Path, fragment: str) -> Path | None:
    """The cached kernel built last with this configuration and recipe."""
    wanted = hashlib.sha256(fragment.encode()).hexdigest()
    found: list[tuple[float, Path]] = []
    for about in cache.glob("*/kernel.json"):
        origin = json.loads(about.read_text())
        if (origin["config_sha256"], origin["recipe"], origin["architecture"]) == (wanted, RECIPE, platform.machine()):
            found.append((about.stat().st_mtime, about.parent / "linux"))
    return max(found)[1] if found else None


def build(package: Package, origin: Origin, fragment: str, cache: Path, note: Note) -> None:
    """Make ``cache/<key>``: in a temporary folder beside it, then moved in one step. Raises LabError."""
    if shutil.disk_usage(cache).free < _BUILD_BYTES:
        raise LabError(
            f"{cache} has less than {_BUILD_BYTES >> 30} GiB free for building a kernel",
            next_step="free some space, or name another folder: MESHFUSION_LAB_CACHE=/path",
        )
    for left_behind in cache.glob("building-*"):  # by a build that was killed: we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    log = cache / f"{origin.key}.log"
    log.unlink(missing_ok=True)
    steps = Steps("the guest's kernel", log, note)
    note(f"building {package.name} {package.version} for guests, once; about 10 minutes of one processor")
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as work:
        tree = unpack(download(package, Path(work), steps), Path(work), steps)
        try:
            apply_changes(tree)
        except SourceChangeError as error:
            raise steps.failure("adapting the source", str(error)) from error
        configure(tree, fragment, steps)
        make = [*_make(tree), f"-j{len(os.sched_getaffinity(0))}", "linux"]
        steps.run(
            "compiling",
            make,
            directory=tree,
            deadline_s=_BUILD_DEADLINE_S,
            environment=_make_environment(),
            progress=lambda: f"{compiled_files(log.read_text(errors='replace'))} files",
        )
        result = Path(work) / "result"
        result.mkdir()
        steps.run(
            "stripping",
            ["strip", "-o", str(result / "linux"), "linux"],
            directory=tree,
            deadline_s=_STEP_DEADLINE_S,
        )
        shutil.copy(tree / ".config", result / "config")
        (result / "kernel.json").write_text(json.dumps(asdict(origin), indent=2) + "\n")
        result.rename(cache / origin.key)
    log.unlink()
    note(f"the guest's kernel is built: {cache / origin.key}")


def unpack(package_file: Path, work: Path, steps: Steps) -> Path:
    """The source tree, without what this configuration never compiles."""
    steps.run(
        "unpacking the package",
        ["dpkg-deb", "-x", str(package_file), str(work / "package")],
        directory=work,
        deadline_s=_STEP_DEADLINE_S,
    )
    package_file.unlink()
    archive = next((work / "package" / "usr" / "src").glob("linux-source-*.tar.*"))
    tree = work / "tree"
    tree.mkdir()
    excluded = [f"--exclude={pattern}" for pattern in _UNUSED_SOURCE]
    argv = ["tar", "-x", "-f", str(archive), "--strip-components=1", *excluded]
    steps.run("unpacking the source", argv, directory=tree, deadline_s=_STEP_DEADLINE_S)
    return tree


def configure(tree: Path, fragment: str, steps: Steps) -> None:
    """Raises LabError when the kernel would lack an option of ``fragment``."""
    (tree / "lab.config").write_text(fragment)
    for step, argv in (
        ("configuring", [*_make(tree), "allnoconfig"]),
        ("configuring", ["scripts/kconfig/merge_config.sh", "-m", "-O", ".", ".config", "lab.config"]),
        ("configuring", [*_make(tree), "olddefconfig"]),
    ):
        steps.run(step, argv, directory=tree, deadline_s=_STEP_DEADLINE_S, environment=_make_environment())
    lacking = unmet_options(fragment, (tree / ".config").read_text())
    if lacking:
        raise steps.failure("configuring", f"this kernel does not take these options: {', '.join(lacking)}")


def options(text: str) -> dict[str, str]:
    """``CONFIG_X=value`` lines and ``# CONFIG_X is not set`` ones, which are "n"."""
    found = dict(re.findall(r"(?m)^(CONFIG_\w+)=(\S+)$", text))
    return found | dict.fromkeys(re.findall(r"(?m)^# (CONFIG_\w+) is not set$", text), "n")


def unmet_options(fragment: str, config: str) -> list[str]:
    """What ``fragment`` asks for and ``config`` does not have; an option that does not exist is "n"."""
    have = options(config)
    return [f"{name}={value}" for name, value in options(fragment).items() if have.get(name, "n") != value]


def compiled_files(log: str) -> int:
    return len(re.findall(r"(?m)^  CC ", log))


def _make(tree: Path) -> list[str]:
    return ["make", "-C", str(tree), "ARCH=um", "--no-print-directory"]


def _make_environment() -> dict[str, str]:
    """The result names neither the machine nor the person nor the day."""
    stamps = {"KBUILD_BUILD_USER": "lab", "KBUILD_BUILD_HOST": "lab", "KBUILD_BUILD_TIMESTAMP": "1970-01-01"}
    return {**build_environment(), **stamps}
