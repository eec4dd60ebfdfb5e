"""Names that the manifests share, and what an object's metadata has."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from typing import Any, Final

Manifest = dict[str, Any]

APP: Final = "meshfusion"
CONTAINER: Final = "service"
CONFIG_DIR: Final = PurePosixPath("/etc/meshfusion")
CONFIG_KEY: Final = "service.yaml"
CONFIG_FILE: Final = CONFIG_DIR / CONFIG_KEY
STORAGE_LABEL: Final = "meshfusion.io/storage"
"""Of nodes that run a service, where no node is named."""
NAME_LABEL: Final = "app.kubernetes.io/name"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"

# A StatefulSet's name stands in its pods' label controller-revision-hash, with 11 more characters, of 63 at most.
_MOST_CHARS: Final = 52
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def is_node_name(text: str) -> bool:
    """As Kubernetes has them: a DNS subdomain in lower case."""
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def is_namespace(text: str) -> bool:
    """A DNS label."""
    return len(text) <= 63 and "." not in text and _SUBDOMAIN.fullmatch(text) is not None


def instance_name(node: str | None) -> str:
    """Of the objects that belong to the service of ``node``, or of all nodes. Different nodes have different ones."""
    if node is None:
        return APP
    plain = f"{APP}-{node.replace('.', '-')}"
    if "." not in node and len(plain) <= _MOST_CHARS:
        return plain
    # Dots become hyphens, and what is too long is cut: neither may make two nodes one.
    mark = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"{plain[: _MOST_CHARS - len(mark) - 1].rstrip('-')}-{mark}"


def placement(node: str | None) -> Manifest:
    """Parts of a pod that say where it runs: on ``node``, or on nodes with the label. By the node's name itself, which
    the label kubernetes.io/hostname may differ from."""
    if node is None:
        return {"nodeSelector": {STORAGE_LABEL: "true"}}
    by_name = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [by_name]}}
    return {"affinity": {"nodeAffinity": required}}


def service_labels(instance: str) -> dict[str, str]:
    """Of the pods of one service."""
    return {NAME_LABEL: APP, COMPONENT_LABEL: "chunk-service", INSTANCE_LABEL: instance}


def all_services() -> dict[str, str]:
    """What the pods of all services have in common."""
    return {NAME_LABEL: APP, COMPONENT_LABEL: "chunk-service"}


def metadata(name: str, namespace: str | None, labels: dict[str, str], **more: Any) -> Manifest:
    """``namespace`` None: that into which it is applied."""
    placed = {} if namespace is None else {"namespace": namespace}
    return {"name": name, **placed, "labels": dict(labels), **more}
