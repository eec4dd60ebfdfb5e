"""The engines of this user that run on this machine without their cache, and why: by what they left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshfusion.host.connector.off_note import OffNote, decode_note
from meshfusion.host.path.flexpath.board import read_file
from meshfusion.host.path.flexpath.run_dir import check_run_dir, run_dir
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.engine_paths import IsGone, is_gone
from meshfusion.tools.mfctl.findings import Finding, State

_NAME: Final = re.compile(r"off-\d{1,10}\.json")
CHECK: Final = "engines"


def check_engines(folder: Path | None = None, *, is_gone: IsGone = is_gone) -> Iterator[Finding]:
    """A warning for each that runs without its cache; what engines that are gone left is passed over."""
    folder = folder or run_dir(os.environ, os.getuid())
    try:
        if folder.exists():
            check_run_dir(folder, os.getuid())
        paths = sorted(path for path in folder.glob("off-*.json") if _NAME.fullmatch(path.name))
    except (OSError, MeshFusionError) as error:
        next_step = error.next_step if isinstance(error, MeshFusionError) else "Run mfctl as the engines' user."
        yield Finding(CHECK, State.WARN, f"what engines say cannot be looked at: {error}", next_step)
        return
    is_any = False
    for path in paths:
        finding = _finding(path, is_gone)
        is_any = is_any or finding is not None
        if finding is not None:
            yield finding
    if not is_any:
        yield Finding(CHECK, State.INFO, f"none says in {folder} that it runs without its cache")


def _finding(path: Path, is_gone: IsGone) -> Finding | None:
    try:
        note = decode_note(read_file(path), str(path))
    except FileNotFoundError:
        return None  # it has just ended
    except OSError as error:
        return Finding(CHECK, State.WARN, f"{path} cannot be read: {error}", "Run mfctl as the engines' user.")
    except MeshFusionError as error:
        return Finding(CHECK, State.WARN, error.message, error.next_step)
    return None if is_gone(note.pid, note.written_s) else _off(note)


def _off(note: OffNote) -> Finding:
    return Finding(
        f"engine {note.pid}",
        State.WARN,
        f"runs without its cache ({note.why.value}): " + "\n".join(note.reason.splitlines()),
        f"{note.next_step.rstrip('.')}; then start it again.",
    )
