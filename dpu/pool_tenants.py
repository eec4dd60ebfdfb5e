"""Whose data a pool may hold: noted in its directory before they can store anything, and compared at each opening.

A pool shows all that it holds to all whose it is, and a host that reaches its namespaces can read every block of them:
a pool that was somebody else's must not become another's by a changed line of the configuration.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Final

from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_place import sync_directory
from meshfusion.jbof.errors import ConfigError, FormatError, MediaError

NOTE: Final = "tenants"
_MAX_BYTES: Final = 1 << 20


def admit_tenants(layout: PoolLayout, tenants: frozenset[str], *, is_new: bool) -> None:
    """Serve these. ``is_new``: it was never served; one that was, and has no note, is the default tenant's, as all were
    before there were notes. More may come to share it with all those who were there before, and some may leave.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` when some would come and others are not named any more,
    :class:`~meshfusion.jbof.errors.FormatError` for a note that cannot be read, and MediaError.
    """
    before = check_tenants(layout, tenants, is_new=is_new)
    if not tenants <= before and before | tenants != {DEFAULT_TENANT}:  # which none stands for, once it was served
        _note(layout, before | tenants)


def check_tenants(layout: PoolLayout, tenants: frozenset[str], *, is_new: bool) -> frozenset[str]:
    """Those whose data it may hold by now. Raises as :func:`admit_tenants`, and changes nothing."""
    before = _noted(layout)
    if before is None:
        before = frozenset() if is_new else frozenset({DEFAULT_TENANT})
    newcomers, gone = tenants - before, before - tenants
    if newcomers and gone:
        path = shlex.quote(str(layout.directory))
        raise ConfigError(
            f"tenants = {_listed(tenants)}: the pool {layout.directory} holds data of {_listed(gone)}, which "
            f"{_listed(newcomers)} could read",
            next_step=f"create it anew, empty: rm -r {path}, then mfctl pool create {path}; or name {_listed(gone)} "
            "too, if they are to share it",
        )
    return before


def _listed(tenants: Collection[str]) -> str:
    return ", ".join(sorted(tenants))


def _noted(layout: PoolLayout) -> frozenset[str] | None:
    """None: nothing was noted."""
    file = layout.directory / NOTE
    try:
        text = file.read_bytes()[:_MAX_BYTES].decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MediaError(f"{file} cannot be read: {error}", next_step="check its permissions") from error
    except UnicodeDecodeError as error:
        raise _damaged(file) from error
    if not text.endswith("\n") or not text.isascii():
        raise _damaged(file)
    return frozenset(text.split())


def _note(layout: PoolLayout, tenants: frozenset[str]) -> None:
    file, part = layout.directory / NOTE, layout.directory / f".{NOTE}.new"
    try:
        with part.open("w") as opened:
            opened.write("".join(f"{tenant}\n" for tenant in sorted(tenants)))
            opened.flush()
            os.fsync(opened.fileno())
        part.rename(file)
        sync_directory(layout.directory)
    except OSError as error:
        raise MediaError(f"{file} cannot be written: {error}", next_step="check space and permissions there") from error


def _damaged(file: Path) -> FormatError:
    return FormatError(
        f"{file} is damaged: it does not list the tenants whose data the pool may hold",
        next_step="write their names into it, one a line, or create the pool anew",
    )
