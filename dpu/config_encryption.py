"""The part of a pool's configuration that says how it is encrypted, and what the machine has against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from meshfusion.dpu.config_types import AbsolutePath, ConfigModel
from meshfusion.dpu.encryption.key_file import key_file_problem
from meshfusion.dpu.encryption.note import KeyPlace
from meshfusion.dpu.encryption.slices import check_configured, look_at_slices
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.config_problems import as_fix
from meshfusion.jbof.drives.system.luks import CRYPTSETUP, Luks
from meshfusion.jbof.errors import MeshFusionError


class EncryptionConfig(ConfigModel):
    """The pool's drives, which are block devices, are encrypted (dm-crypt); docs/tenants.md says what that protects."""

    header_dir: AbsolutePath = Field(
        description="Directory for the drives' LUKS2 headers, which lie nowhere else.",
        examples=["/etc/meshfusion/headers"],
    )
    key_file: AbsolutePath = Field(
        description="File with the key: 32 to 4096 random bytes, mode 0600, the service's user's, not on these drives.",
        examples=["/etc/meshfusion/pool.key"],
    )

    @property
    def place(self) -> KeyPlace:
        return KeyPlace(self.header_dir, self.key_file)


def encryption_problems(encryption: Any) -> Iterator[tuple[str, object, str, str]]:
    """``(name, value, problem, fix)`` of what the raw mapping names; what the model rejects is told elsewhere."""
    paths = encryption if isinstance(encryption, dict) else {}
    header_dir, key_file = _path(paths.get("header_dir")), _path(paths.get("key_file"))
    if header_dir is not None and not header_dir.is_dir():
        yield "header_dir", str(header_dir), "is no directory", f"mkdir -m 700 {header_dir}"
    problem = None if key_file is None else key_file_problem(key_file)
    if problem:
        yield "key_file", str(key_file), *problem


def look_at_encryption(
    path: Path, encryption: Any, luks: Luks = CRYPTSETUP
) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """Of the pool that exists at ``path``: ``(problem, fix)`` where it is not encrypted as the raw mapping has it, and
    warnings where its drives are not open, so that what is on them cannot be looked at. Nothing is changed."""
    paths = encryption if isinstance(encryption, dict) else {}
    header_dir, key_file = _path(paths.get("header_dir")), _path(paths.get("key_file"))
    layout = PoolLayout(path.absolute())
    try:
        place = None if header_dir is None or key_file is None else KeyPlace(header_dir, key_file)
        if place is None and encryption is not None:
            return None, ()
        note = check_configured(layout, place)
        if note is None or place is None:
            return None, ()
        return None, look_at_slices(replace(note, place=place), luks)
    except MeshFusionError as error:
        return (error.message, as_fix(error.next_step)), ()


def _path(value: object) -> Path | None:
    """None where the model rejects it."""
    return Path(value) if isinstance(value, str) and value.startswith("/") and "\0" not in value else None
