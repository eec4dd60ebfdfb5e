"""The objects of a chunk service: its configuration, its pods and how many of them may be away."""

from __future__ import annotations

import hashlib
from typing import Final

from meshfusion.tools.k8s.names import (
    APP,
    CONFIG_KEY,
    Manifest,
    all_services,
    metadata,
    placement,
    service_labels,
)
from meshfusion.tools.k8s.needs import ServiceNeeds
from meshfusion.tools.k8s.service_pod import PodPlan, pod_spec

DIGEST_ANNOTATION: Final = "meshfusion.io/config-sha256"


def namespace_object(name: str) -> Manifest:
    """The service needs the node's network and directories, which namespaces may forbid."""
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def config_map(name: str, namespace: str | None, instance: str, config_text: str) -> Manifest:
    """``config_text``: the file as it is, with its comments."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(name, namespace, service_labels(instance)),
        "data": {CONFIG_KEY: config_text},
    }


def daemon_set(
    instance: str, namespace: str | None, needs: ServiceNeeds, plan: PodPlan, config_text: str, node: str | None = None
) -> Manifest:
    """On all nodes that have the label, or on ``node`` alone."""
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(instance, namespace, service_labels(instance)),
        "spec": {
            "selector": {"matchLabels": service_labels(instance)},
            # One after another, the old pod first: a pool has one owner. A new one that is not ready stops it.
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
            "template": _template(instance, needs, plan, config_text, node),
        },
    }


def stateful_set(
    instance: str, namespace: str | None, needs: ServiceNeeds, plan: PodPlan, config_text: str, node: str
) -> Manifest:
    """One pod, on ``node``: it is not begun anew as long as the former may still run."""
    template = _template(instance, needs, plan, config_text, node)
    # It belongs to that node: moving it away when the node is not heard from would help nobody.
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    stays = [{"key": key, "operator": "Exists", "effect": "NoExecute"} for key in keys]
    template["spec"]["tolerations"] = stays
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(instance, namespace, service_labels(instance)),
        "spec": {
            "replicas": 1,
            "serviceName": APP,
            "selector": {"matchLabels": service_labels(instance)},
            "template": template,
        },
    }


def headless_service(namespace: str | None, needs: ServiceNeeds) -> Manifest:
    """Gives the pods of StatefulSets names; engines reach them by these or by their nodes'."""
    ports = [{"name": "telemetry", "port": needs.telemetry.port, "protocol": "TCP"}]
    if needs.api is not None:
        ports.append({"name": "api", "port": needs.api.port, "protocol": "TCP"})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(APP, namespace, all_services()),
        # An engine asks the service itself how it is.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": all_services(), "ports": ports},
    }


def disruption_budget(namespace: str | None) -> Manifest:
    """Over the StatefulSets of all nodes: one service away at a time costs its hits only."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(APP, namespace, all_services()),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": all_services()},
            # One that is not ready is no reason to keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _template(instance: str, needs: ServiceNeeds, plan: PodPlan, config_text: str, node: str | None) -> Manifest:
    digest = hashlib.sha256(config_text.encode()).hexdigest()
    return {
        "metadata": {"labels": service_labels(instance), "annotations": {DIGEST_ANNOTATION: digest}},
        "spec": {**pod_spec(needs, plan), **placement(node)},
    }
