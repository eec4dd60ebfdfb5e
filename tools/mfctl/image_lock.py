"""``mfctl image lock``."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal

import click

from meshfusion.tools.image.architecture import ARCHITECTURES
from meshfusion.tools.image.lock import TARGETS, Lock, Target, lock_text, make_lock, read_lock_file
from meshfusion.tools.image.requirements import DEBIAN_ROOTS, requirements
from meshfusion.tools.image.source import LOCKS
from meshfusion.tools.image.store import PackageStore
from meshfusion.tools.image.wheel_source import resolve_wheels
from meshfusion.tools.mfctl.image_places import cache_folder, checkout
from meshfusion.tools.mfctl.output import print_document
from meshfusion.tools.mfctl.progress import Progress


def make_image_lock(
    arch: Literal["arm64", "amd64"], output: Path | None, options: dict[str, Any], output_format: str
) -> None:
    root = checkout(options["source"])
    path = output or root / LOCKS / f"{arch}.json"
    former = read_lock_file(path) if path.exists() else None
    store = PackageStore(cache_folder(options["cache"], root), ARCHITECTURES[arch], options["apt_sources"])
    new = _resolved(arch, root, store, options["spdk_roots"])
    part = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.write_text(lock_text(new))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    changes = _changes(former, new)
    if output_format != "table":
        count = len(new.debs) + len(new.wheels)
        print_document({"lock": str(path), "packages": count, "changes": changes}, output_format)
        return
    click.echo(f"wrote {path}: {len(new.debs)} Debian packages and {len(new.wheels)} wheels")
    for change in changes:
        click.echo(f"  {change}")


def _resolved(arch: Literal["arm64", "amd64"], root: Path, store: PackageStore, spdk_roots: tuple[str, ...]) -> Lock:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    roots: dict[Target, list[str]] = {target: list(DEBIAN_ROOTS[target]) for target in TARGETS}
    roots["spdk"] += [name for name in spdk_roots if name not in roots["spdk"]]
    asked = {target: requirements(project, target) for target in TARGETS}
    debian = store.debian
    steps = 1 + 2 * len(TARGETS)
    with Progress("resolving packages", left="the lock is as it was") as progress:
        debian.update()
        progress.update(1, steps)
        debs = {target: debian.resolve(roots[target]) for target in TARGETS}
        progress.update(1 + len(TARGETS), steps)
        wheels = {target: resolve_wheels(asked[target], store.architecture) for target in TARGETS}
    return make_lock(arch, roots=roots, requires=asked, debs=debs, wheels=wheels)


def _changes(former: Lock | None, new: Lock) -> list[str]:
    """In words, by package."""
    if former is None:
        return []
    before = {package.name: package.version for package in (*former.debs, *former.wheels)}
    after = {package.name: package.version for package in (*new.debs, *new.wheels)}
    return [
        f"{name} {before.get(name, 'new')} -> {after.get(name, 'gone')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
