"""Digest of the model's actual weights: the files, not their name.

A file's digest is a tree: SHA-256 over its length and the SHA-256 digests of its 64 MiB ranges, so that
many threads can share one large file (hashing releases the interpreter lock). Digests are remembered per
file in a small JSON cache, keyed by path and guarded by size, times and inode.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshfusion.host.kv.freshness import first_changed_since
from meshfusion.jbof.errors import UnsupportedError

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
INDEX_SUFFIX = ".index.json"  # which shard holds which tensor, and which files count
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Formats that read top-level files of the model folder and nothing else.
FILE_LOAD_FORMATS = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
    }
)

RANGE_BYTES = 64 << 20
READ_BYTES = 1 << 20
CACHE_VERSION = 1
SETTLE_S = 2.0  # a file this young may change again without a new timestamp: digest it, do not remember it

Progress = Callable[[int, int], None]  # (bytes done, bytes in total); called from worker threads

_VOUCH = "set weights_id in kv_connector_extra_config: a name of your own that you change whenever the weights change"


def default_cache_path(environ: Mapping[str, str] = os.environ) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "meshfusion" / "weights.json"


@dataclass(slots=True)
class FileDigester:
    """Digests files with several threads and a cache. ``cache_path=None``: no cache."""

    cache_path: Path | None = field(default_factory=default_cache_path)
    thread_count: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))
    settle_s: float = SETTLE_S
    progress: Progress | None = None

    def digest_files(self, paths: Iterable[Path]) -> dict[Path, str]:
        """Hex digest per file. Raises :class:`UnsupportedError` when one cannot be read or keeps changing."""
        try:
            return self._digest_files({path: _stamp(path) for path in paths})
        except OSError as error:
            raise UnsupportedError(
                f"cannot read {error.filename or 'a file'} to identify it: {error.strerror or error}",
                next_step=f"make the file readable for this process, or {_VOUCH}",
            ) from error

    def _digest_files(self, stamps: dict[Path, dict[str, int]]) -> dict[Path, str]:
        known = _read_cache(self.cache_path)
        digests: dict[Path, str] = {}
        for path, stamp in stamps.items():
            entry = known.get(str(path.resolve()))
            if entry is not None and entry["stamp"] == stamp:
                digests[path] = entry["digest"]
        missing = {path: stamp for path, stamp in stamps.items() if path not in digests}
        if not missing:
            return digests
        digests |= self._compute({path: stamp["size"] for path, stamp in missing.items()})
        changed = [str(path) for path, stamp in missing.items() if _stamp(path) != stamp]
        if changed:
            raise UnsupportedError(
                f"files changed while they were read: {', '.join(changed)}",
                next_step="wait until the model folder is complete, then start again",
            )
        newest_ns = time.time_ns() - int(self.settle_s * 1e9)
        fresh = {
            str(path.resolve()): {"stamp": stamp, "digest": digests[path]}
            for path, stamp in missing.items()
            if max(stamp["mtime_ns"], stamp["ctime_ns"]) <= newest_ns
        }
        if self.cache_path is not None and fresh:
            _write_cache(self.cache_path, fresh)
        return digests

    def _compute(self, sizes: Mapping[Path, int]) -> dict[Path, str]:
        total, done = sum(sizes.values()), 0
        parts: dict[Path, list[bytes]] = {path: [] for path in sizes}
        with concurrent.futures.ThreadPoolExecutor(self.thread_count, thread_name_prefix="weights") as pool:
            jobs = [
                (
                    path,
                    min(RANGE_BYTES, size - start),
                    pool.submit(_digest_range, path, start, min(RANGE_BYTES, size - start)),
                )
                for path, size in sizes.items()
                for start in range(0, size, RANGE_BYTES)
            ]
            for path, length, job in jobs:
                parts[path].append(job.result())
                done += length
                if self.progress is not None:
                    self.progress(done, total)
        return {
            path: hashlib.sha256(struct.pack("<Q", sizes[path]) + b"".join(parts[path])).hexdigest() for path in sizes
        }


def weights_fact(
    model_config: Any,
    load_config: Any,
    *,
    weights_id: str | None = None,
    digester: FileDigester | None = None,
    engine_started_ns: int | None = None,
) -> str:
    """What the identity says about the weights: ``files:<hex>``, or ``vouched:<id>`` when the user says so.

    ``engine_started_ns``: when the process that loaded them began; files changed since then are refused.
    Raises :class:`UnsupportedError` when the weights cannot be told from their files.
    """
    if weights_id is not None:
        if not isinstance(weights_id, str) or not weights_id.strip():
            raise UnsupportedError(
                f"weights_id is {weights_id!r}, not a non-empty string",
                next_step=_VOUCH,
            )
        return f"vouched:{weights_id}"
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    if load_format == "dummy":
        raise UnsupportedError(
            "load_format 'dummy' makes random weights that no file describes",
            next_step=f"use real weights, or {_VOUCH}",
        )
    if load_format not in FILE_LOAD_FORMATS:
        raise UnsupportedError(
            f"load_format {load_format!r} is not known to read only the files of the model folder",
            next_step=f"use load_format auto, or {_VOUCH}",
        )
    folder = resolve_model_folder(model_config, load_config)
    suffixes: tuple[str, ...] = (*WEIGHT_SUFFIXES, INDEX_SUFFIX)
    if getattr(model_config, "trust_remote_code", False):
        suffixes = (
            *suffixes,
            ".py",
        )  # code from the model folder may change what the bytes mean
    digest = folder_digest(folder, suffixes, digester or FileDigester())
    if engine_started_ns is not None:
        _refuse_changed(folder, suffixes, engine_started_ns)
    return f"files:{digest}"


def _refuse_changed(folder: Path, suffixes: tuple[str, ...], engine_started_ns: int) -> None:
    changed = first_changed_since([folder, *_matching_files(folder, suffixes)], engine_started_ns)
    if changed is not None:
        raise UnsupportedError(
            f"{changed} was changed after this engine process began: which weights it has loaded is not known",
            next_step=f"start the engine again now that the files are in place, or {_VOUCH}",
        )


def resolve_model_folder(model_config: Any, load_config: Any) -> Path:
    """The local folder the engine read: itself, or the snapshot of a hub id in the local cache."""
    name = getattr(model_config, "model_weights", "") or model_config.model
    if os.path.isdir(name):
        return Path(name)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnsupportedError(
            f"model {name!r} comes from ModelScope, whose cache is not searched",
            next_step=_VOUCH,
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name,
                revision=model_config.revision,
                cache_dir=load_config.download_dir,
                local_files_only=True,
            )
        )
    except Exception as error:
        raise UnsupportedError(
            f"cannot find the files of model {name!r} (revision {model_config.revision}): "
            f"{type(error).__name__}: {error}",
            next_step=f"pass the model as a local folder, or {_VOUCH}",
        ) from error


def folder_digest(folder: Path, suffixes: tuple[str, ...], digester: FileDigester) -> str:
    """Hex digest over (name, size, content) of the matching top-level files. The folder's own path stays out."""
    files = _matching_files(folder, suffixes)
    if not any(path.name.endswith(WEIGHT_SUFFIXES) for path in files):
        raise UnsupportedError(
            f"no weight files ({', '.join(WEIGHT_SUFFIXES)}) in {folder}",
            next_step=f"check the model folder, or {_VOUCH}",
        )
    digests = digester.digest_files(files)
    rows = [[path.name, digests[path]] for path in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _matching_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffixes) and path.is_file())


def processor_fact(model_config: Any, load_config: Any) -> str:
    """For multimodal models: digest of the files that say how media becomes model input; "" when there are none."""
    folder = resolve_model_folder(model_config, load_config)
    rows = [
        [
            name,
            hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        ]
        for name in PROCESSOR_FILES
        if (folder / name).is_file()
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    # ctime too: copying tools put mtime back after they changed the content.
    return {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
        "device": stat.st_dev,
    }


def _digest_range(path: Path, start: int, length: int) -> bytes:
    digest = hashlib.sha256()
    buffer = bytearray(min(READ_BYTES, length))
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_SEQUENTIAL)
        while length:
            view = memoryview(buffer)[: min(len(buffer), length)]
            got = os.preadv(file.fileno(), [view], start)
            if got == 0:
                raise OSError(5, "file ended early", str(path))
            digest.update(view[:got])
            start, length = start + got, length - got
    return digest.digest()


def _read_cache(path: Path | None) -> dict[str, Any]:
    """Entries of the cache; a missing, damaged or foreign file is an empty one."""
    if path is None:
        return {}
    try:
        content = json.loads(path.read_bytes())
        files = content["files"] if content["version"] == CACHE_VERSION else {}
        return {
            name: entry
            for name, entry in files.items()
            if isinstance(entry["stamp"], dict) and len(bytes.fromhex(entry["digest"])) == 32
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write_cache(path: Path, fresh: Mapping[str, Any]) -> None:
    """Merges and replaces atomically. Two processes at once may lose entries, never damage the file."""
    content = {"version": CACHE_VERSION, "files": {**_read_cache(path), **fresh}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning(
            "cannot remember weight digests in %s (%s); they are computed again next time",
            path,
            error,
        )
