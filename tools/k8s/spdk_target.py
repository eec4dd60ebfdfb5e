"""SPDK's nvmf_tgt beside the service, in its pod. Its image is the operator's: SPDK is in no registry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.tools.k8s.names import Manifest
from meshfusion.tools.k8s.volumes import Volume, scratch

HUGE_PAGE_BYTES: Final = 2 << 20
_MIB: Final = 1 << 20
# Beside its huge pages: code, stacks, and what its RDMA library keeps.
_MEMORY: Final = "512Mi"


def huge_page_count(spdk: SpdkConfig) -> int:
    """Of 2 MiB."""
    return math.ceil(spdk.memory / HUGE_PAGE_BYTES)


def socket_volume(spdk: SpdkConfig, folders: Iterable[PurePosixPath]) -> tuple[Volume, ...]:
    """For both; none where the socket lies in one of the ``folders`` that both have from the node."""
    directory = PurePosixPath(spdk.socket.parent)
    return () if directory in folders else (scratch("target", directory),)


def target_volumes() -> tuple[Volume, ...]:
    """Its own."""
    return (
        scratch("huge-pages", PurePosixPath("/dev/hugepages"), medium="HugePages-2Mi"),
        scratch("dpdk", PurePosixPath("/var/run/dpdk")),
    )


def target_container(spdk: SpdkConfig, image: str, volumes: Iterable[Volume]) -> Manifest:
    """As a sidecar (an init container that stays, Kubernetes 1.29), so that it begins before the service and ends after
    it: engines drain over it. ``volumes``: with the service's drives, of which it makes bdevs."""
    socket = str(spdk.socket)
    mask = f"0x{(1 << spdk.cores) - 1:x}"
    huge = f"{huge_page_count(spdk) * 2}Mi"
    return {
        "name": "nvmf-tgt",
        "image": image,
        "restartPolicy": "Always",
        # --wait-for-rpc: the service divides its memory, which is possible only before it begins (docs/exports.md).
        "command": ["nvmf_tgt", "--wait-for-rpc", "-r", socket, "-s", str(spdk.memory // _MIB), "-m", mask],
        "startupProbe": {
            "exec": {"command": ["test", "-S", socket]},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 30,
        },
        "resources": {
            "requests": {"cpu": str(spdk.cores), "memory": _MEMORY, "hugepages-2Mi": huge},
            "limits": {"memory": _MEMORY, "hugepages-2Mi": huge},
        },
        # Its RDMA devices, drives and physical addresses are the node's.
        "securityContext": {"privileged": True, "runAsUser": 0},
        "volumeMounts": [volume.as_mount for volume in volumes],
    }
