"""The service on BlueField DPUs under NVIDIA's DOCA Platform Framework (DPF): what its operator is given.

Fields are those of the types in https://github.com/NVIDIA/doca-platform (`api/dpuservice/v1alpha1`,
`api/provisioning/v1alpha1`).
"""

from __future__ import annotations

from typing import Any, Final

from meshfusion.tools.k8s.names import APP, Manifest, all_services, metadata
from meshfusion.tools.k8s.needs import ServiceNeeds
from meshfusion.tools.k8s.spdk_target import huge_page_count

CHART_NAME: Final = "meshfusion"
FLAVOR: Final = "meshfusion"
SERVICE_ID_LABEL: Final = "svc.dpu.nvidia.com/service"
_MOST_NAME_CHARS: Final = 63
# A flavor's parameters replace the image's own, so that these have to be among them.
_CONSOLES: Final = ("console=hvc0", "console=ttyAMA0", "earlycon=pl011,0x13010000", "fixrttc")


def dpu_service(instance: str, namespace: str, manifests: list[Manifest], repo_url: str, version: str) -> Manifest:
    """``manifests``: of the service on one DPU, in the DPUs' cluster. They are values of the chart, which holds nothing
    else. ``repo_url``: where the chart was pushed, ``oci://...`` or ``https://...``."""
    assert len(instance) <= _MOST_NAME_CHARS, "instance_name keeps them shorter"
    return {
        "apiVersion": "svc.dpu.nvidia.com/v1alpha1",
        "kind": "DPUService",
        "metadata": metadata(instance, namespace, all_services()),
        "spec": {
            "serviceID": instance,
            "helmChart": {
                "source": {"repoURL": repo_url, "chart": CHART_NAME, "version": version, "releaseName": instance},
                "values": {"manifests": manifests},
            },
            "security": {"privileged": any(map(_is_privileged, manifests))},
        },
    }


def with_service_id(workload: Manifest, instance: str) -> Manifest:
    """DPF lets no pod in that does not say of which of its services it is."""
    template = workload["spec"]["template"]
    labels = {**template["metadata"]["labels"], SERVICE_ID_LABEL: instance}
    template = {**template, "metadata": {**template["metadata"], "labels": labels}}
    return {**workload, "spec": {**workload["spec"], "template": template}}


def _is_privileged(manifest: Manifest) -> bool:
    """Has a container that is."""
    pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
    containers = [*pod.get("initContainers", ()), *pod.get("containers", ())]
    return any(container["securityContext"].get("privileged", False) for container in containers)


def dpu_flavor(namespace: str, needs: ServiceNeeds) -> Manifest:
    """What the service adds to a DPU, as a whole flavor to start from: a flavor cannot be changed, and that of your
    network (OVS, SFs) has to have these as well."""
    parameters = list(_CONSOLES)
    files: list[dict[str, Any]] = []
    if needs.spdk is not None:
        parameters += ["default_hugepagesz=2M", "hugepagesz=2M", f"hugepages={huge_page_count(needs.spdk)}"]
    if needs.exports_by_kernel:
        modules = f"nvmet\nnvmet-{needs.transport}\n"
        files.append(
            {"path": f"/etc/modules-load.d/{APP}.conf", "operation": "override", "permissions": "0644", "raw": modules}
        )
    return {
        "apiVersion": "provisioning.dpu.nvidia.com/v1alpha1",
        "kind": "DPUFlavor",
        "metadata": metadata(FLAVOR, namespace, all_services()),
        "spec": {
            "grub": {"kernelParameters": parameters},
            # DPU mode: in NIC mode its cores run nothing.
            "nvconfig": [{"device": "*", "parameters": ["INTERNAL_CPU_MODEL=1", "INTERNAL_CPU_OFFLOAD_ENGINE=0"]}],
            **({"configFiles": files} if files else {}),
        },
    }
