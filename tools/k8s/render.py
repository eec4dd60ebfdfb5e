"""All manifests that were asked for, in the order in which they are applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.config import ServiceConfig
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError
from meshfusion.tools.k8s import dpf, monitors, service_objects
from meshfusion.tools.k8s.engine import SECRET, EnginePlan, deployment, near_pool
from meshfusion.tools.k8s.names import CONFIG_DIR, STORAGE_LABEL, Manifest, instance_name
from meshfusion.tools.k8s.needs import ServiceNeeds, needs_of
from meshfusion.tools.k8s.service_pod import PodPlan

_MODULES: Final = "the kernel's target needs the modules nvmet and nvmet-{} on the node: /etc/modules-load.d"


@dataclass(frozen=True, slots=True)
class Asked:
    """``node``: for which it is; None: for all that have the label. ``drives_are_devices``: also where the
    configuration names none. ``spdk_image``: see :class:`PodPlan`. ``monitor_labels``: None where
    monitoring is not asked for. ``dpf_chart``: where the chart was pushed, for DPUs under DPF."""

    source: str
    namespace: str
    image: str
    node: str | None
    drives_are_devices: bool
    memory_bytes: int
    cpus: float
    drain_s: float
    spdk_image: str | None = None
    engine: EnginePlan | None = None
    monitor_labels: dict[str, str] | None = None
    dpf_chart: str | None = None
    chart_version: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """``notes``: what has to be there before, and cannot be rendered."""

    manifests: tuple[Manifest, ...]
    notes: tuple[str, ...]


def render(config: ServiceConfig, config_text: str, asked: Asked) -> Rendered:
    """``config_text``: the file that ``config`` was read from.

    Raises :class:`~meshfusion.jbof.config_problems.ConfigProblemsError` with what no pod could do.
    """
    needs = needs_of(
        config,
        source=asked.source,
        node=asked.node,
        may_have_devices=asked.drives_are_devices,
        has_own_target=asked.spdk_image is not None,
    )
    problems = tuple(_problems(needs, asked))
    if problems:
        raise ConfigProblemsError(asked.source, problems, next_step="Correct what is named.")
    manifests = _on_dpus(needs, config_text, asked) if asked.dpf_chart else _on_nodes(needs, config_text, asked)
    if asked.monitor_labels is not None:
        manifests.append(monitors.pod_monitor(asked.namespace, asked.monitor_labels))
        manifests.append(monitors.prometheus_rule(asked.namespace, asked.monitor_labels))
    if asked.engine is not None:
        pool = near_pool(config, asked.engine, asked.drives_are_devices)
        manifests.append(deployment(asked.engine, asked.namespace, asked.node, pool))
    return Rendered(tuple(manifests), tuple(_notes(needs, asked)))


def _problems(needs: ServiceNeeds, asked: Asked) -> list[ConfigProblem]:
    found = []
    if asked.spdk_image is not None and needs.spdk is None:
        fix = "leave --spdk-image out, or use target: spdk"
        found.append(ConfigProblem("exports.target", "is not spdk, and an image of SPDK is given", fix))
    if asked.monitor_labels is not None and needs.telemetry.is_loopback:
        fix = "use 0.0.0.0:9477 with telemetry.allow_public: true, behind your cluster's network policy"
        problem = "is the node's own, and Prometheus asks from elsewhere"
        found.append(ConfigProblem("telemetry.listen", problem, fix, str(needs.telemetry)))
    if asked.dpf_chart is not None and needs.api is None:
        fix = "name an address of the DPU beside it, with tls (docs/security.md)"
        found.append(ConfigProblem("listen", "is a socket, and a DPU's engines are on another machine", fix))
    return found


def _plan(asked: Asked, instance: str) -> PodPlan:
    return PodPlan(
        image=asked.image,
        config_map=f"{instance}-config",
        secret=f"{instance}-files",
        memory_bytes=asked.memory_bytes,
        cpus=asked.cpus,
        drain_s=asked.drain_s,
        spdk_image=asked.spdk_image,
    )


def _on_nodes(needs: ServiceNeeds, config_text: str, asked: Asked) -> list[Manifest]:
    instance, namespace = instance_name(asked.node), asked.namespace
    plan = _plan(asked, instance)
    found = [
        service_objects.namespace_object(namespace),
        service_objects.config_map(plan.config_map, namespace, instance, config_text),
    ]
    if asked.node is None:
        return [*found, service_objects.daemon_set(instance, namespace, needs, plan, config_text)]
    return [
        *found,
        service_objects.headless_service(namespace, needs),
        service_objects.stateful_set(instance, namespace, needs, plan, config_text, asked.node),
        service_objects.disruption_budget(namespace),
    ]


def _on_dpus(needs: ServiceNeeds, config_text: str, asked: Asked) -> list[Manifest]:
    assert asked.node is not None, "checked by the command"
    assert asked.dpf_chart is not None
    instance = instance_name(asked.node)
    plan = _plan(asked, instance)
    workload = service_objects.daemon_set(instance, None, needs, plan, config_text, asked.node)
    inner = [
        service_objects.config_map(plan.config_map, None, instance, config_text),
        dpf.with_service_id(workload, instance),
    ]
    return [
        dpf.dpu_flavor(asked.namespace, needs),
        dpf.dpu_service(instance, asked.namespace, inner, asked.dpf_chart, asked.chart_version),
    ]


def _notes(needs: ServiceNeeds, asked: Asked) -> list[str]:
    found = []
    instance = instance_name(asked.node)
    if asked.node is None:
        found.append(f"label the nodes: kubectl label node NODE {STORAGE_LABEL}=true")
    if needs.secret_files:
        where = " in the DPUs' cluster" if asked.dpf_chart else ""
        names = [path.name for path in needs.secret_files]
        found.append(_secret_note(f"{instance}-files", asked.namespace, names, where))
    if needs.exports_by_kernel:
        found.append(_MODULES.format(needs.transport))
    if needs.is_privileged:
        found.append("the service's container is privileged: its drives are the node's block devices")
    if not needs.can_be_drained:
        found.append(
            "the pod cannot drain its service, which asks who calls: SIGTERM gives what is open stop_grace_s = "
            f"{needs.stop_grace_s:g} s. With a socket beside it in listen it could (docs/security.md)"
        )
    if asked.engine is not None and asked.engine.files:
        found.append(_secret_note(SECRET, asked.namespace, [path.name for _, path in asked.engine.files], ""))
    return found


def _secret_note(name: str, namespace: str, files: list[str], where: str) -> str:
    each = " ".join(f"--from-file={file}" for file in files)
    return (
        f"what lies below {CONFIG_DIR} comes from a Secret; make it{where} before: "
        f"kubectl --namespace {namespace} create secret generic {name} {each}"
    )
