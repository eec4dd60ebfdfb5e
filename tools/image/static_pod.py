"""The kubelet's static pod of the service, for cards whose container runtime is the way in."""

from __future__ import annotations

import ipaddress
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from meshfusion.dpu.api.address import TcpAddress
from meshfusion.tools.image.host_files import CACHE, HUGE_PAGE_BYTES, MFCTL
from meshfusion.tools.image.service_needs import CONFIG_FILE, CONFIG_FOLDER, ServiceNeeds

_START_S, _LOOK_S = 15 * 60, 10
"""As the systemd unit has it: a large pool's index is looked through before it is served."""
_CLOSING_S: Final = 65  # as the unit's


def static_pod(needs: ServiceNeeds, image: str, spdk: tuple[str, str] | None) -> str:
    """YAML. ``image``: its reference, which must have been imported before. ``spdk``: reference of the image with
    nvmf_tgt and its path there."""
    volumes = _volumes(needs)
    containers = [_service(needs, image, list(volumes))]
    if spdk is not None:
        containers.insert(0, _target(needs, *spdk, list(volumes)))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "meshfusion", "namespace": "kube-system", "labels": {"app": "meshfusion"}},
        "spec": {
            # Portals, RDMA devices and listen are the card's.
            "hostNetwork": True,
            "priorityClassName": "system-node-critical",
            "terminationGracePeriodSeconds": round(needs.stop_grace_s) + _CLOSING_S,
            "containers": containers,
            "volumes": [{"name": name, "hostPath": source} for name, (source, _) in volumes.items()],
        },
    }
    text: str = yaml.safe_dump(pod, sort_keys=False)
    return text


def _service(needs: ServiceNeeds, image: str, names: list[str]) -> dict[str, Any]:
    return {
        "name": "service",
        "image": image,
        "imagePullPolicy": "Never",  # it is imported from the bundle, whose digests were compared
        "command": [MFCTL, "service", "run", "--config", str(CONFIG_FILE)],
        "startupProbe": _probe(needs, "/healthz", _LOOK_S, _START_S // _LOOK_S),
        "livenessProbe": _probe(needs, "/healthz", 15, 4),
        "readinessProbe": _probe(needs, "/readyz", 10, 2),
        # The drives, which come and go, and the kernel's target are the card's.
        "securityContext": {"privileged": True, "runAsUser": 0},
        "volumeMounts": _mounts(needs, names),
    }


def _target(needs: ServiceNeeds, image: str, program: str, names: list[str]) -> dict[str, Any]:
    assert needs.spdk is not None
    memory_bytes = -(-needs.spdk.memory // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    huge = {"hugepages-2Mi": f"{memory_bytes >> 20}Mi", "memory": "512Mi"}
    mask = f"0x{(1 << needs.spdk.cores) - 1:x}"
    socket = str(needs.spdk.socket)
    return {
        "name": "nvmf-tgt",
        "image": image,
        "imagePullPolicy": "Never",
        "command": [program, "--wait-for-rpc", "-r", socket, "-s", str(needs.spdk.memory >> 20), "-m", mask],
        "resources": {"requests": huge, "limits": huge},
        "securityContext": {"privileged": True, "runAsUser": 0},
        "volumeMounts": _mounts(needs, names),
    }


def _volumes(needs: ServiceNeeds) -> dict[str, tuple[dict[str, str], str]]:
    """Each with where it is mounted: at the same place as on the card, so that a configuration means the same."""
    folders = [CONFIG_FOLDER, PurePosixPath(CACHE), PurePosixPath("/var/lib/meshfusion")]
    folders += [one for one in needs.folders if not any(top == one or top in one.parents for top in folders)]
    named = {f"folder-{i}": _of_card(str(folder), "DirectoryOrCreate") for i, folder in enumerate(folders)}
    named["devices"] = _of_card("/dev", "Directory")
    named["machine-id"] = _of_card("/etc/machine-id", "File")
    if needs.spdk is None:
        named["configfs"] = _of_card("/sys/kernel/config", "Directory")
    if needs.is_encrypted:
        named["cryptsetup"] = _of_card("/run/cryptsetup", "DirectoryOrCreate")
    return named


def _of_card(path: str, kind: str) -> tuple[dict[str, str], str]:
    return {"path": path, "type": kind}, path


def _mounts(needs: ServiceNeeds, names: list[str]) -> list[dict[str, Any]]:
    return [{"name": name, "mountPath": _volumes(needs)[name][1]} for name in names]


def _probe(needs: ServiceNeeds, path: str, every_s: int, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": needs.monitors.port, "host": _asked_host(needs.monitors)}
    return {"httpGet": get, "periodSeconds": every_s, "timeoutSeconds": 5, "failureThreshold": failures}


def _asked_host(address: TcpAddress) -> str:
    """Where the kubelet reaches what listens there."""
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return address.host
    return ("::1" if ip.version == 6 else "127.0.0.1") if ip.is_unspecified else address.host
