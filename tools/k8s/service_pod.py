"""The pod of a chunk service."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from meshfusion.dpu.api.address import TcpAddress
from meshfusion.tools.k8s.names import CONFIG_FILE, CONTAINER, Manifest
from meshfusion.tools.k8s.needs import ServiceNeeds
from meshfusion.tools.k8s.spdk_target import socket_volume, target_container, target_volumes
from meshfusion.tools.k8s.volumes import Volume, folders_of_node, of_node, scratch, settings
from meshfusion.tools.mfctl.privileges import capabilities
from meshfusion.tools.mfctl.unit_file import CLOSING_S

_SCRATCH: Final = PurePosixPath("/tmp")
_START_S, _START_LOOK_S = 15 * 60, 10
"""As the systemd unit has it: a large pool's index is looked through before it is served."""
_SILENT_S, _LIFE_LOOK_S = 60, 15
"""As its watchdog."""
_ANSWER_S: Final = 5  # of /healthz, which waits 2 s for the pools itself


@dataclass(frozen=True, slots=True)
class PodPlan:
    """``spdk_image``: of an nvmf_tgt in the pod; None: there is none, or it is the node's. ``drain_s``: how long what
    is open may last when the pod is to end. ``secret``: holds certificates, keys and tokens."""

    image: str
    config_map: str
    secret: str
    memory_bytes: int
    cpus: float
    drain_s: float
    spdk_image: str | None = None


def pod_spec(needs: ServiceNeeds, plan: PodPlan) -> Manifest:
    """Without what says on which node it runs."""
    shared = _shared_volumes(needs)
    own = (*_own_volumes(needs, plan), *shared)
    sockets: tuple[Volume, ...] = ()
    targets: tuple[Volume, ...] = ()
    spec: Manifest = {
        "automountServiceAccountToken": False,
        # Portals, RDMA devices and listen are the node's; its name tells services apart where drives are reserved.
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": end_s(needs, plan),
    }
    if plan.spdk_image is not None:
        assert needs.spdk is not None, "checked by the caller"
        sockets, targets = socket_volume(needs.spdk, needs.folders), target_volumes()
        spec["initContainers"] = [target_container(needs.spdk, plan.spdk_image, (*sockets, *targets, *shared))]
    spec["containers"] = [_container(needs, plan, (*own, *sockets))]
    spec["volumes"] = [volume.as_volume for volume in (*own, *sockets, *targets)]
    return spec


def end_s(needs: ServiceNeeds, plan: PodPlan) -> int:
    """From the word to end until the kubelet kills: the drain, what SIGTERM gives beside it, and closing the pools."""
    drain_s = plan.drain_s if needs.can_be_drained else 0.0
    return math.ceil(drain_s) + math.ceil(needs.stop_grace_s) + CLOSING_S


def _container(needs: ServiceNeeds, plan: PodPlan, volumes: tuple[Volume, ...]) -> Manifest:
    container: Manifest = {
        "name": CONTAINER,
        "image": plan.image,
        "command": ["mfctl", "service", "run", "--config", str(CONFIG_FILE)],
        "env": [{"name": "NUMBA_CACHE_DIR", "value": str(_SCRATCH / "numba")}],
        "ports": _ports(needs),
        "startupProbe": _probe(needs, "/healthz", _START_LOOK_S, _START_S // _START_LOOK_S),
        "livenessProbe": _probe(needs, "/healthz", _LIFE_LOOK_S, _SILENT_S // _LIFE_LOOK_S),
        # Not ready holds up a rollout; engines, which ask the service itself, go on with what it can do.
        "readinessProbe": _probe(needs, "/readyz", 10, 2),
        "resources": {"requests": {"cpu": f"{plan.cpus:g}", "memory": f"{plan.memory_bytes >> 20}Mi"}},
        "securityContext": _security(needs),
        "volumeMounts": [volume.as_mount for volume in volumes],
    }
    if needs.can_be_drained:
        drain = ["mfctl", "service", "drain", "--config", str(CONFIG_FILE), "--deadline", f"{plan.drain_s:g}"]
        container["lifecycle"] = {"preStop": {"exec": {"command": drain}}}
    return container


def _ports(needs: ServiceNeeds) -> list[Manifest]:
    """Of the node, since its network is the pod's."""
    named = {"telemetry": needs.telemetry, "api": needs.api}
    return [
        {"name": name, "containerPort": address.port, "hostPort": address.port, "protocol": "TCP"}
        for name, address in named.items()
        if address is not None
    ]


def _probe(needs: ServiceNeeds, path: str, every_s: int, failures: int) -> Manifest:
    get = {"path": path, "port": needs.telemetry.port, "host": asked_host(needs.telemetry)}
    return {"httpGet": get, "periodSeconds": every_s, "timeoutSeconds": _ANSWER_S, "failureThreshold": failures}


def asked_host(address: TcpAddress) -> str:
    """Where a process of the node reaches what listens there."""
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return address.host
    return ("::1" if ip.version == 6 else "127.0.0.1") if ip.is_unspecified else address.host


def _security(needs: ServiceNeeds) -> Manifest:
    """Root, without more than the configuration needs: files and sockets belong to it, and to engines of its user."""
    common: Manifest = {"runAsUser": 0, "runAsGroup": 0, "readOnlyRootFilesystem": True}
    if needs.is_privileged:
        return {**common, "privileged": True}
    needed = capabilities(is_root=True, has_devices=False, exports_by_kernel=needs.exports_by_kernel)
    security: Manifest = {
        **common,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": list(needed)},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if needs.exports_by_kernel:
        # The profile of container runtimes denies writing below /sys, where the target's settings are.
        security["appArmorProfile"] = {"type": "Unconfined"}
    return security


def _own_volumes(needs: ServiceNeeds, plan: PodPlan) -> tuple[Volume, ...]:
    found = [
        settings(plan.config_map, plan.secret, needs.secret_files),
        scratch("tmp", _SCRATCH),
        # Who has drives reserved is told by machine; the image's own would be the same everywhere.
        of_node("machine-id", PurePosixPath("/etc/machine-id"), "File", is_read_only=True),
    ]
    if needs.exports_by_kernel:
        found.append(of_node("configfs", PurePosixPath("/sys/kernel/config"), "Directory"))
    if needs.is_encrypted:
        found.append(of_node("cryptsetup", PurePosixPath("/run/cryptsetup"), "DirectoryOrCreate"))
    return tuple(found)


def _shared_volumes(needs: ServiceNeeds) -> tuple[Volume, ...]:
    """With an nvmf_tgt in the pod, which makes bdevs of the drives' files and devices."""
    devices = (of_node("devices", PurePosixPath("/dev"), "Directory"),) if needs.has_devices else ()
    return (*folders_of_node(needs.folders), *devices)
