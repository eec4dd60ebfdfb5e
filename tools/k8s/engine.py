"""An engine that uses the service: vLLM as a Deployment, with the configuration of `mfctl connector config`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from meshfusion.dpu.api.address import TcpAddress, parse_address
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.config import ServiceConfig
from meshfusion.host.connector.config import EXTRA_CONFIG
from meshfusion.host.path.flexpath.run_dir import ENVIRONMENT as RUN_DIR_VARIABLE
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError
from meshfusion.tools.k8s.names import (
    COMPONENT_LABEL,
    INSTANCE_LABEL,
    NAME_LABEL,
    Manifest,
    metadata,
    placement,
)
from meshfusion.tools.k8s.needs import file_problems, is_device
from meshfusion.tools.k8s.volumes import Volume, of_node, scratch, settings

SECRET: Final = "meshfusion-engine"
_CONTAINER: Final = "vllm"
_PORT: Final = 8000
# Each engine tells there of itself by its process's number, which is the same in many pods: a directory of its own.
_RUN_DIR: Final = "/run/meshfusion-engine"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """``transfer``: its kv_transfer_config. ``model``: a name, or a directory of the node. ``rdma_resource``: as a
    device plugin calls the node's RDMA devices, such as ``rdma/hca_shared_devices_a``; needed by ``path: rdma``."""

    transfer: dict[str, Any]
    image: str
    model: str
    gpus: int
    rdma_resource: str | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """Of the connector."""
        found: dict[str, Any] = self.transfer[EXTRA_CONFIG]
        return found

    @property
    def files(self) -> tuple[tuple[str, PurePosixPath], ...]:
        """``(option of mfctl, path)`` of what it shows to the service."""
        tls = self.extra.get("service_tls", {})
        found = [(f"--service-{name}", tls[name]) for name in ("ca", "certificate", "key") if name in tls]
        if "service_token_file" in self.extra:
            found.append(("--service-token-file", self.extra["service_token_file"]))
        return tuple((option, PurePosixPath(path)) for option, path in found)

    @property
    def is_rdma(self) -> bool:
        return bool(self.extra.get("path") == "rdma")


@dataclass(frozen=True, slots=True)
class NearPool:
    """What an engine of the service's machine uses itself: the directories and files of its tenant's pool, and of no
    other, and devices."""

    directories: tuple[PurePosixPath, ...]
    files: tuple[PurePosixPath, ...]
    has_devices: bool


def near_pool(config: ServiceConfig, plan: EnginePlan, may_have_devices: bool) -> NearPool | None:
    """None where it uses nothing of the machine: it is elsewhere, or data comes over RDMA."""
    address = parse_address(plan.extra["service"])
    sockets = () if isinstance(address, TcpAddress) else (PurePosixPath(address.path.parent),)
    if isinstance(address, TcpAddress) and not address.is_loopback:
        return None
    if plan.is_rdma:
        return NearPool(sockets, (), has_devices=False)
    tenant = plan.extra.get("tenant", DEFAULT_TENANT)
    pool = next(served.pool for served in config.served if tenant in served.tenants)
    data = [PurePosixPath(path) for path in pool.data_path or ()]
    devices = [path for path in data if is_device(path)]
    return NearPool(
        directories=tuple(sorted({*sockets, PurePosixPath(pool.path)})),
        files=tuple(path for path in data if path not in devices),
        has_devices=may_have_devices or bool(devices),
    )


def deployment(plan: EnginePlan, namespace: str, node: str | None, near: NearPool | None) -> Manifest:
    """``node``: of the service, None: of each of many. ``near``: what it uses there itself.

    Raises :class:`~meshfusion.jbof.config_problems.ConfigProblemsError` for what a pod could not have.
    """
    problems = tuple(_problems(plan))
    if problems:
        raise ConfigProblemsError("the engine", problems, next_step="Correct what is named.")
    labels = {NAME_LABEL: _CONTAINER, COMPONENT_LABEL: "engine", INSTANCE_LABEL: "vllm-meshfusion"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata("vllm-meshfusion", namespace, labels),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            # Its GPUs are free only when the former has ended.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {"metadata": {"labels": labels}, "spec": _pod(plan, node, near)},
        },
    }


# ---- inside ------------------------------------------------------------------------------------------------------


def _problems(plan: EnginePlan) -> Iterator[ConfigProblem]:
    yield from file_problems(plan.files)
    if plan.is_rdma and plan.rdma_resource is None:
        fix = "name what your RDMA device plugin calls them"
        yield ConfigProblem("--rdma-resource", "is not given, and path rdma needs the node's RDMA devices", fix)


def _pod(plan: EnginePlan, node: str | None, near: NearPool | None) -> Manifest:
    volumes = _volumes(plan, near)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "containers": [_container(plan, volumes, has_devices=near is not None and near.has_devices)],
        "volumes": [volume.as_volume for volume in volumes],
    }
    if plan.is_rdma or isinstance(parse_address(plan.extra["service"]), TcpAddress):
        # RDMA devices are the node's network's; so is a loopback address, and the way to storage.
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return spec if near is None else {**spec, **placement(node)}


def _container(plan: EnginePlan, volumes: tuple[Volume, ...], *, has_devices: bool) -> Manifest:
    config = json.dumps(plan.transfer)
    health = {"httpGet": {"path": "/health", "port": _PORT}, "periodSeconds": 10, "timeoutSeconds": 5}
    limits = {"nvidia.com/gpu": str(plan.gpus)} if plan.gpus else {}
    # Root, as the service: the socket and the pool's files are its user's.
    security: Manifest = {"runAsUser": 0}
    if has_devices:
        security["privileged"] = True  # it opens the drives itself, as the service does
    if plan.is_rdma:
        assert plan.rdma_resource is not None, "else it was a problem"
        limits[plan.rdma_resource] = "1"
        security["capabilities"] = {"add": ["IPC_LOCK"]}  # memory that is registered stays in place
    return {
        "name": _CONTAINER,
        "image": plan.image,
        "command": ["vllm", "serve", plan.model, "--port", str(_PORT), "--kv-transfer-config", config],
        "env": [{"name": RUN_DIR_VARIABLE, "value": _RUN_DIR}],
        "ports": [{"name": "http", "containerPort": _PORT, "protocol": "TCP"}],
        "startupProbe": {**health, "failureThreshold": 180},
        "readinessProbe": {**health, "failureThreshold": 3},
        "resources": {"limits": limits},
        "securityContext": security,
        "volumeMounts": [volume.as_mount for volume in volumes],
    }


def _volumes(plan: EnginePlan, near: NearPool | None) -> tuple[Volume, ...]:
    found = [scratch("shm", PurePosixPath("/dev/shm"), medium="Memory")]  # between the ranks of an engine
    files = [path for _, path in plan.files]
    if files:
        found.append(settings(None, SECRET, files))
    if near is not None:
        # They are there when the service is; until then the pod waits.
        found += [of_node(f"near-{i}", path, "Directory") for i, path in enumerate(near.directories)]
        found += [of_node(f"data-{i}", path, "File") for i, path in enumerate(near.files)]
        found += [of_node("devices", PurePosixPath("/dev"), "Directory")] if near.has_devices else []
    if plan.model.startswith("/"):
        found.append(of_node("model", PurePosixPath(plan.model), "Directory", is_read_only=True))
    return tuple(found)
