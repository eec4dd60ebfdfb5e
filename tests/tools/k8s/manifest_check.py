"""Is a manifest as Kubernetes takes it? By the schemas of its releases, and by what these cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import jsonschema
import kubernetes_validate

from tests.tools.k8s.crd_fields import CRDS

RELEASES: Final = ("1.30", "1.33", "1.37")
"""The oldest that is supported, one between, and the newest that is known."""
_METADATA: Final = {"name", "namespace", "labels"}


def check(manifest: dict[str, Any]) -> None:
    """Raises ``jsonschema.ValidationError`` or AssertionError."""
    schema = CRDS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is not None:
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        assert set(manifest["metadata"]) <= _METADATA
        jsonschema.validate(manifest["spec"], schema)
        for inner in manifest["spec"].get("helmChart", {}).get("values", {}).get("manifests", ()):
            check(inner)
        return
    for release in RELEASES:
        kubernetes_validate.validate(manifest, release, strict=True)
    for template in _templates(manifest):
        _check_pod(template["spec"])
        selected, labels = manifest["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]
        assert selected.items() <= labels.items(), "a workload selects its own pods"
    assert all(len(value) <= 63 for value in manifest["metadata"].get("labels", {}).values())


def _templates(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "template" in manifest.get("spec", {}):
        yield manifest["spec"]["template"]


def _check_pod(pod: dict[str, Any]) -> None:
    volumes = [volume["name"] for volume in pod["volumes"]]
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    assert len(set(volumes)) == len(volumes), "a volume's name is given once"
    assert all(len(volume) <= 63 for volume in volumes)
    used = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    assert used == set(volumes), "what is mounted is a volume, and what is a volume is mounted"
    names = [container["name"] for container in containers]
    assert len(set(names)) == len(names)
    for container in containers:
        places = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(places)) == len(places), f"{container['name']} mounts two volumes in one place"
        _check_huge_pages(container["resources"])
        ports = {port["containerPort"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(probe, {}):
                assert container[probe]["httpGet"]["port"] in ports, f"{probe} asks where nothing listens"
        if container["securityContext"].get("privileged"):
            # Refused by the API server, which the schema does not say.
            assert container["securityContext"].get("allowPrivilegeEscalation") is not False
    for volume in pod["volumes"]:
        medium = volume.get("emptyDir", {}).get("medium", "")
        if medium.startswith("HugePages-"):
            wanted = f"hugepages-{medium.removeprefix('HugePages-')}"
            assert any(wanted in container["resources"].get("limits", {}) for container in containers)


def _check_huge_pages(resources: dict[str, Any]) -> None:
    """Requests and limits of huge pages are equal, and memory or processors are asked for beside them."""
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name in {*requests, *limits}:
        if name.startswith("hugepages-"):
            assert requests.get(name, limits.get(name)) == limits.get(name)
            assert "memory" in requests or "cpu" in requests
