"""What the Prometheus operator reads: where to scrape, and the alert rules."""

from __future__ import annotations

from typing import Final

import yaml

from meshfusion.tools.k8s.names import APP, Manifest, all_services, metadata
from meshfusion.tools.monitoring import alert_rules

_API: Final = "monitoring.coreos.com/v1"


def pod_monitor(namespace: str, labels: dict[str, str]) -> Manifest:
    """``labels``: by which the operator's Prometheus selects its monitors and rules. The rules take the job to be
    ``meshfusion``, and an alert is told of a node, not of an address."""
    relabelings = [
        {"targetLabel": "job", "replacement": APP, "action": "replace"},
        {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance", "action": "replace"},
    ]
    endpoint = {"port": "telemetry", "path": "/metrics", "interval": "30s", "relabelings": relabelings}
    return {
        "apiVersion": _API,
        "kind": "PodMonitor",
        "metadata": metadata(APP, namespace, {**all_services(), **labels}),
        "spec": {"selector": {"matchLabels": all_services()}, "podMetricsEndpoints": [endpoint]},
    }


def prometheus_rule(namespace: str, labels: dict[str, str]) -> Manifest:
    groups = yaml.safe_load(alert_rules())["groups"]
    return {
        "apiVersion": _API,
        "kind": "PrometheusRule",
        "metadata": metadata(APP, namespace, {**all_services(), **labels}),
        "spec": {"groups": groups},
    }
