"""Digest of LoRA adapters by content.

The engine's block hashes carry an adapter's name and path, not its bytes, so the pool's keys must. An
adapter whose bytes cannot be pinned down gets no reuse.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfusion.host.kv.freshness import first_changed_since
from meshfusion.host.kv.weights import WEIGHT_SUFFIXES, FileDigester
from meshfusion.jbof.errors import UnsupportedError

logger = logging.getLogger(__name__)

NO_ADAPTER = b""

Stamps = tuple[tuple[str, int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    path: str
    flags: tuple[object, ...]
    stamps: Stamps
    digest: bytes | None  # None: no reuse, for the rest of this process


class AdapterDigests:
    """Remembers each adapter by its ``lora_int_id`` for the life of the process.

    Thread-safe. The first call for an adapter reads its files (tens to hundreds of MB), so make it away
    from the scheduler's thread; later calls only look at file times.
    """

    def __init__(
        self, *, lora_dtype: str = "", digester: FileDigester | None = None, engine_started_ns: int | None = None
    ) -> None:
        """``engine_started_ns``: when the engine's process began. It loads an adapter at a moment we do not see, so one
        whose files changed since then is not reused: they may be another version's."""
        self._engine_started_ns = engine_started_ns
        self._lora_dtype = lora_dtype
        self._digester = digester or FileDigester(cache_path=None, thread_count=2)
        self._seen: dict[int, _Seen] = {}
        self._lock = threading.Lock()

    def digest(self, lora_request: Any | None) -> bytes | None:
        """32 bytes for an adapter, ``b""`` without one, ``None`` when its KV must not be reused.

        ``None`` is final for that id: the engine may still hold the earlier bytes.
        """
        if lora_request is None:
            return NO_ADAPTER
        with self._lock:
            seen = self._seen.get(lora_request.lora_int_id)
            if seen is not None and seen.digest is None:
                return None
            digest, seen = self._look(lora_request, seen)
            self._seen[lora_request.lora_int_id] = seen
            return digest

    def _look(self, lora_request: Any, seen: _Seen | None) -> tuple[bytes | None, _Seen]:
        path = os.path.expanduser(lora_request.lora_path)
        flags = (
            bool(getattr(lora_request, "is_3d_lora_weight", False)),
            self._lora_dtype,
        )
        try:
            reason = _refusal(lora_request, path)
            files = [] if reason else _adapter_files(Path(path))
            stamps = _stamps(files)
            if seen is not None and not reason and (path, flags, stamps) != (seen.path, seen.flags, seen.stamps):
                reason = "its path or files changed since it was first used"
            if seen is not None and not reason:
                return seen.digest, seen
            if not reason and self._engine_started_ns is not None:
                changed = first_changed_since([Path(path), *files], self._engine_started_ns)
                reason = f"{changed} was changed after the engine began" if changed is not None else ""
            if not reason and not any(file.name.endswith(WEIGHT_SUFFIXES) for file in files):
                reason = f"there are no weight files in {path}"
            digest = None if reason else self._content_digest(files, flags)
            if digest is not None and _stamps(_adapter_files(Path(path))) != stamps:
                reason, digest = "its files changed while they were read", None
        except (OSError, UnsupportedError) as error:
            reason, digest, stamps = f"its files cannot be read: {error}", None, ()
        if reason:
            logger.warning(
                "KV of adapter %r (id %d) is not reused: %s",
                lora_request.lora_name,
                lora_request.lora_int_id,
                reason,
            )
        return digest, _Seen(path, flags, stamps, digest)

    def _content_digest(self, files: list[Path], flags: tuple[object, ...]) -> bytes:
        digests = self._digester.digest_files(files)
        rows = [(file.name, digests[file]) for file in files]
        return hashlib.sha256(repr((rows, flags)).encode()).digest()


def _refusal(lora_request: Any, path: str) -> str:
    if getattr(lora_request, "load_inplace", False):
        return "load_inplace replaces an adapter under the same id"
    if not os.path.isdir(path):
        return f"{lora_request.lora_path!r} is not a local folder, so its content is not known"
    return ""


def _adapter_files(folder: Path) -> list[Path]:
    suffixes = (*WEIGHT_SUFFIXES, ".json")
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffixes) and path.is_file())


def _stamps(files: list[Path]) -> Stamps:
    rows = []
    for file in files:
        stat = file.stat()
        rows.append((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(rows)
