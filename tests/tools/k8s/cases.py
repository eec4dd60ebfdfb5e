"""Configurations of the service, one for each form in which it is run on Kubernetes, and what is rendered of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml
from click.testing import CliRunner, Result

from meshfusion.tools.mfctl.main import mfctl

Manifest = dict[str, Any]

SOCKET: Final = "unix:///run/meshfusion/meshfusion.sock"
POOL: Final = {"path": "/var/lib/meshfusion/pool", "create": True, "size": "64GiB"}
TLS: Final = {
    "certificate": "/etc/meshfusion/tls/service.pem",
    "key": "/etc/meshfusion/tls/service.key",
    "client_ca": "/etc/meshfusion/tls/ca.pem",
}
PUBLIC: Final = {"listen": "0.0.0.0:9477", "allow_public": True}
NEAR: Final[Manifest] = {"listen": SOCKET, "pool": POOL, "telemetry": {"listen": "127.0.0.1:9477"}}
"""A service and engines of each node."""
FAR: Final[Manifest] = {
    "listen": [SOCKET, "10.0.0.1:7700"],
    "pool": {**POOL, "data_path": ["/dev/nvme1n1", "/dev/nvme2n1"]},
    "tls": TLS,
    "access": [{"subject": "engine-1", "role": "engine"}],
    "exports": {"target": "nvmet", "portals": ["rdma://10.0.0.1:4420", "rdma://10.0.1.1:4420"]},
    "telemetry": PUBLIC,
}
"""A storage node, or a DPU."""
SPDK: Final[Manifest] = {
    **FAR,
    "exports": {
        "target": "spdk",
        "portals": ["rdma://10.0.0.1:4420"],
        "spdk": {"socket": "/run/spdk/spdk.sock", "memory": "8GiB", "cores": 4},
    },
}
SHOWN: Final = (
    "--service-ca", "/etc/meshfusion/tls/ca.pem",
    "--service-certificate", "/etc/meshfusion/tls/engine-1.pem",
    "--service-key", "/etc/meshfusion/tls/engine-1.key",
)  # fmt: skip
ENGINE: Final = ("--engine-image", "registry.example/vllm-meshfusion:0.32", "--model", "/models/llama")
CHART: Final = "oci://registry.example/charts"


def render(config: Manifest, *arguments: str, before: tuple[str, ...] = ()) -> Result:
    """``arguments`` beside ``--config`` and ``--image``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "service.yaml"
        file.write_text(yaml.safe_dump(config))
        image = ("--image", "registry.example/meshfusion:0.1.0")
        return CliRunner().invoke(mfctl, [*before, "k8s", "render", "--config", str(file), *image, *arguments])


def manifests(config: Manifest, *arguments: str, before: tuple[str, ...] = ()) -> list[Manifest]:
    result = render(config, *arguments, "--format", "json", before=before)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    items: list[Manifest] = found["items"]
    return items


def one(items: list[Manifest], kind: str) -> Manifest:
    (found,) = (item for item in items if item["kind"] == kind)
    return found


def pod(items: list[Manifest], kind: str) -> Manifest:
    found: Manifest = one(items, kind)["spec"]["template"]["spec"]
    return found


def service(items: list[Manifest], kind: str) -> Manifest:
    """Its container."""
    (found,) = pod(items, kind)["containers"]
    assert isinstance(found, dict)
    return found


def all_cases() -> dict[str, list[Manifest]]:
    node = ("--node", "storage-1.rack-2")
    rdma = ("--rdma-resource", "rdma/hca_shared_devices_a")
    encrypted = {**FAR["pool"], "encryption": {"header_dir": "/var/lib/mf/h", "key_file": "/var/lib/mf/keys/pool.key"}}
    return {
        "each node": manifests(NEAR, *ENGINE),
        "each node, monitored": manifests(
            {**NEAR, "telemetry": PUBLIC}, "--monitoring", "--monitor-label", "release=prometheus"
        ),
        "a storage node, kernel": manifests(FAR, *node, *ENGINE, *rdma, "--monitoring", before=SHOWN),
        "a storage node, its own SPDK": manifests(SPDK, *node, "--spdk-image", "registry.example/spdk:26.09"),
        "a storage node, the node's SPDK": manifests(SPDK, *node),
        "files over TCP": manifests(
            {**FAR, "pool": POOL, "exports": {"target": "nvmet", "portals": ["tcp://10.0.0.1:4420"]}}, *node
        ),
        "encrypted": manifests({**FAR, "pool": encrypted}, *node),
        "a DPU, kernel": manifests(FAR, *node, "--dpf-chart", CHART),
        "a DPU, SPDK": manifests(SPDK, *node, "--dpf-chart", CHART, "--spdk-image", "registry.example/spdk:26.09"),
    }
