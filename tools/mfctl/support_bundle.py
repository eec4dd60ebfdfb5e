"""An archive for whoever is asked for help: parts, each made by itself, and a manifest that says what is in it.

A part that cannot be made is listed with its error; it costs the others nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.jbof.errors import ConfigError, MeshFusionError
from meshfusion.tools.mfctl.output import to_json

PART_DEADLINE_S: Final = 60.0
MANIFEST: Final = "manifest.json"
# Of a part; what is more is cut off, and that is said at its end.
MAX_PART_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """``name``: of its file in the archive. ``make``: its text, or a value that is written as JSON; may raise."""

    name: str
    make: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Failure:
    part: str
    error: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Collected:
    """``files``: by name."""

    files: dict[str, bytes]
    failures: tuple[Failure, ...]


def collect(parts: Iterable[Part], *, deadline_s: float = PART_DEADLINE_S) -> Collected:
    """``deadline_s``: of each part. One that hangs is given up, and its thread is left behind."""
    files: dict[str, bytes] = {}
    failures = []
    for part in parts:
        made = _make(part, deadline_s)
        if isinstance(made, Failure):
            failures.append(made)
        else:
            files[part.name] = made
    return Collected(files, tuple(failures))


def _make(part: Part, deadline_s: float) -> bytes | Failure:
    outcome: list[bytes | Failure] = []

    def run() -> None:
        try:
            outcome.append(_encoded(part.make()))
        except MeshFusionError as error:
            outcome.append(Failure(part.name, error.message, error.next_step))
        except Exception as error:  # whatever is broken here is what help is asked for
            # Where, but not with which values: an exception's text may quote what it was given.
            where = traceback.extract_tb(error.__traceback__)[-1]
            told = str(error) if isinstance(error, OSError) else ""
            place = f"{Path(where.filename).name}:{where.lineno}"
            outcome.append(Failure(part.name, f"{type(error).__name__} at {place} {told}".rstrip()))

    thread = threading.Thread(target=run, name=f"support-{part.name}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return outcome[0] if outcome else Failure(part.name, f"was not there after {deadline_s:g} s")


def _encoded(value: object) -> bytes:
    text = value if isinstance(value, str) else to_json(value, indent=2) + "\n"
    data = text.encode(errors="replace")
    if len(data) <= MAX_PART_BYTES:
        return data
    return data[:MAX_PART_BYTES] + f"\n(cut off: {len(data)} bytes in all)\n".encode()


def write_bundle(path: Path, collected: Collected, *, facts: dict[str, object], now_s: float) -> None:
    """At ``path``, readable by this user only, whole or not at all. ``facts``: go into the manifest. ``now_s``: Unix
    time, of its files.

    Raises :class:`ConfigError` when something is there already, and OSError.
    """
    entries = [
        {"name": name, "length_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in collected.files.items()
    ]
    manifest = {**facts, "files": entries, "failed": list(collected.failures)}
    if path.exists():
        raise ConfigError(f"--output: {path} exists", next_step="Name another file, or remove it.")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                folder = path.name.split(".")[0]
                for name, data in ((MANIFEST, _encoded(manifest)), *collected.files.items()):
                    _add(archive, f"{folder}/{name}", data, now_s)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # which fails when something has come there meanwhile
    finally:
        part.unlink(missing_ok=True)


def _add(archive: tarfile.TarFile, name: str, data: bytes, now_s: float) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(now_s), 0o600
    archive.addfile(entry, io.BytesIO(data))
