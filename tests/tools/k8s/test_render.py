"""``mfctl k8s render``: what is rendered is what Kubernetes takes, and what the service's own code says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from meshfusion.dpu.telemetry.alerts import ALERTS
from meshfusion.tools.k8s.names import instance_name
from meshfusion.tools.k8s.yaml_stream import yaml_stream
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.unit_file import CLOSING_S
from tests.tools.k8s.cases import (
    CHART,
    ENGINE,
    FAR,
    NEAR,
    POOL,
    PUBLIC,
    SHOWN,
    SOCKET,
    SPDK,
    Manifest,
    all_cases,
    manifests,
    one,
    pod,
    render,
    service,
)
from tests.tools.k8s.manifest_check import check

NODE = ("--node", "storage-1")
RDMA = ("--rdma-resource", "rdma/hca_shared_devices_a")


@pytest.fixture(scope="module")
def every_case() -> dict[str, list[Manifest]]:
    return all_cases()


# ---- as Kubernetes takes it --------------------------------------------------------------------------------------


def test_all_that_is_rendered_is_as_the_schemas_have_it(every_case: dict[str, list[Manifest]]) -> None:
    kinds = set()
    for items in every_case.values():
        for item in items:
            check(item)
            kinds.add(item["kind"])
    assert kinds == {
        "ConfigMap", "DPUFlavor", "DPUService", "DaemonSet", "Deployment", "Namespace", "PodDisruptionBudget",
        "PodMonitor", "PrometheusRule", "Service", "StatefulSet",
    }  # fmt: skip


def _container(item: Manifest) -> Any:
    return item["spec"]["template"]["spec"]["containers"][0]


MISTAKES: dict[str, tuple[str, Callable[[Manifest], object]]] = {
    "a key that is misspelt": ("DaemonSet", lambda item: item["spec"].update(updateStrategies={})),
    "one deep inside": ("DaemonSet", lambda item: _container(item)["livenessProbe"].update(timeoutSecond=1)),
    "a number that is a text": ("DaemonSet", lambda item: _container(item)["ports"][0].update(containerPort="9477")),
    "a field that is missing": ("DaemonSet", lambda item: item["spec"].pop("selector")),
    "pods that are not selected": (
        "DaemonSet",
        lambda item: item["spec"]["template"]["metadata"]["labels"].pop("app.kubernetes.io/name"),
    ),
    "a mount without a volume": ("DaemonSet", lambda item: _container(item)["volumeMounts"][0].update(name="other")),
    "a probe of another port": ("DaemonSet", lambda item: _container(item)["readinessProbe"]["httpGet"].update(port=1)),
    "a privileged container that may not be": (
        "DaemonSet",
        lambda item: _container(item)["securityContext"].update(privileged=True),
    ),
    "a budget without a selector's form": (
        "PodDisruptionBudget",
        lambda item: item["spec"].update(selector=["meshfusion"]),
    ),
    "a rule without an expression": (
        "PrometheusRule",
        lambda item: item["spec"]["groups"][0]["rules"][0].pop("expr"),
    ),
    "a monitor's unknown field": (
        "PodMonitor",
        lambda item: item["spec"]["podMetricsEndpoints"][0].update(targetport=9477),
    ),
    "a chart that is not to be had": (
        "DPUService",
        lambda item: item["spec"]["helmChart"]["source"].update(repoURL="file:///charts"),
    ),
    "a mistake in what the chart carries": (
        "DPUService",
        lambda item: item["spec"]["helmChart"]["values"]["manifests"][1]["spec"].update(replicas=3),
    ),
    "an operation that there is not": (
        "DPUFlavor",
        lambda item: item["spec"]["configFiles"][0].update(operation="replace"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, every_case: dict[str, list[Manifest]]) -> None:
    kind, plant = MISTAKES[name]
    item = copy.deepcopy(next(one for items in every_case.values() for one in items if one["kind"] == kind))
    check(item)
    plant(item)
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        check(item)


def test_a_stream_of_yaml_says_the_same_as_the_list() -> None:
    arguments = (*NODE, *ENGINE, *RDMA, "--monitoring")
    shown = render(FAR, *arguments, before=SHOWN)
    assert shown.exit_code == 0, shown.output
    assert list(yaml.safe_load_all(shown.stdout)) == manifests(FAR, *arguments, before=SHOWN)
    assert render(FAR, *arguments, "--format", "yaml", before=SHOWN).stdout == shown.stdout
    assert "service.yaml: |\n" in shown.stdout, "the configuration can be read"


@pytest.mark.parametrize("word", ["y", "N", "yes", "on", "null", "1", "1e3", "0x1", "~", "1:30", "01"])
def test_words_that_a_reader_might_take_for_something_else_are_quoted(word: str) -> None:
    """Kubernetes' reader takes y and n for booleans, too, which PyYAML does not."""
    assert yaml_stream([{"value": word}]).strip().splitlines()[1] in (f'value: "{word}"', f"value: '{word}'")


# ---- the configuration ------------------------------------------------------------------------------------------


def test_the_pod_gets_the_file_as_it_is_and_the_service_takes_it(tmp_path: Path) -> None:
    text = (
        f"# ours\nlisten: unix://{tmp_path}/run/s\n"
        f"pool: {{path: {tmp_path}/pools/one, create: true, size: 8MiB, segment_size: 1MiB}}\n"
        "telemetry: {listen: 127.0.0.1:9477}\n"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "pools").mkdir()
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    result = CliRunner().invoke(mfctl, ["k8s", "render", "--config", str(file), "--image", "m:1", "--format", "json"])
    assert result.exit_code == 0, result.output
    items = json.loads(result.stdout)["items"]
    data = one(items, "ConfigMap")["data"]
    assert data == {"service.yaml": text}
    (tmp_path / "service.yaml").write_text(data["service.yaml"])
    checked = CliRunner().invoke(mfctl, ["config", "check", str(tmp_path / "service.yaml")])
    assert checked.exit_code == 0, checked.output
    # What the pod mounts is where this configuration has it.
    mounts = {mount["mountPath"] for mount in service(items, "DaemonSet")["volumeMounts"]}
    assert {f"{tmp_path}/run", f"{tmp_path}/pools", "/etc/meshfusion"} <= mounts
    command = service(items, "DaemonSet")["command"]
    assert command == ["mfctl", "service", "run", "--config", "/etc/meshfusion/service.yaml"]
    (settings,) = (volume for volume in pod(items, "DaemonSet")["volumes"] if volume["name"] == "settings")
    (source,) = settings["projected"]["sources"]
    assert source["configMap"] == {
        "name": one(items, "ConfigMap")["metadata"]["name"],
        "items": [{"key": "service.yaml", "path": "service.yaml"}],
    }


def test_a_changed_configuration_makes_new_pods() -> None:
    def digest(config: Manifest) -> str:
        annotations = one(manifests(config), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["meshfusion.io/config-sha256"])

    assert digest(NEAR) == digest(NEAR) != digest({**NEAR, "stop_grace_s": 11.0})


def test_certificates_come_from_a_secret_to_where_the_configuration_has_them() -> None:
    items = manifests(FAR, *NODE, *ENGINE, *RDMA, before=SHOWN)
    volume = pod(items, "StatefulSet")["volumes"][0]["projected"]
    assert volume["defaultMode"] == 0o400, "the service refuses keys that others can read"
    assert volume["sources"][1]["secret"]["items"] == [
        {"key": "ca.pem", "path": "tls/ca.pem"},
        {"key": "service.key", "path": "tls/service.key"},
        {"key": "service.pem", "path": "tls/service.pem"},
    ]
    note = render(FAR, *NODE).stderr
    name = volume["sources"][1]["secret"]["name"]
    assert f"create secret generic {name} --from-file=service.pem --from-file=service.key --from-file=ca.pem" in note


# ---- the pod ----------------------------------------------------------------------------------------------------


def test_a_pod_that_is_to_end_drains_and_gets_the_time_that_the_service_takes() -> None:
    config = {**NEAR, "stop_grace_s": 20.5}
    items = manifests(config, "--drain", "90")
    command = service(items, "DaemonSet")["lifecycle"]["preStop"]["exec"]["command"]
    assert command == [
        "mfctl", "service", "drain", "--config", "/etc/meshfusion/service.yaml", "--deadline", "90",
    ]  # fmt: skip
    assert pod(items, "DaemonSet")["terminationGracePeriodSeconds"] == 90 + 21 + CLOSING_S


def test_a_service_that_asks_who_calls_is_not_drained_from_inside() -> None:
    """The pod has nothing to show; SIGTERM lets what is open end within stop_grace_s."""
    config = {**FAR, "listen": "10.0.0.1:7700", "stop_grace_s": 30.0}
    items = manifests(config, *NODE)
    assert "lifecycle" not in service(items, "StatefulSet")
    assert pod(items, "StatefulSet")["terminationGracePeriodSeconds"] == 30 + CLOSING_S
    assert "cannot drain its service" in render(config, *NODE).stderr


def test_files_need_no_privileges() -> None:
    security = service(manifests(NEAR), "DaemonSet")["securityContext"]
    assert "privileged" not in security
    assert "appArmorProfile" not in security
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["DAC_OVERRIDE", "FOWNER"]}
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)


def test_the_kernels_target_needs_its_settings_and_no_more() -> None:
    config = {**FAR, "pool": POOL}
    items = manifests(config, *NODE)
    security = service(items, "StatefulSet")["securityContext"]
    assert "privileged" not in security
    assert security["capabilities"]["add"] == ["DAC_OVERRIDE", "FOWNER", "SYS_ADMIN"]
    assert security["appArmorProfile"] == {"type": "Unconfined"}
    assert "/sys/kernel/config" in [mount["mountPath"] for mount in service(items, "StatefulSet")["volumeMounts"]]
    assert "modules nvmet and nvmet-rdma" in render(config, *NODE).stderr


@pytest.mark.parametrize(("config", "more"), [(FAR, NODE), (NEAR, ("--devices",))])
def test_drives_that_are_devices_need_all_devices(config: Manifest, more: tuple[str, ...]) -> None:
    items = manifests(config, *more)
    kind = "StatefulSet" if more == NODE else "DaemonSet"
    assert service(items, kind)["securityContext"]["privileged"] is True
    assert "/dev" in [mount["mountPath"] for mount in service(items, kind)["volumeMounts"]]
    assert "is privileged" in render(config, *more).stderr


def test_encrypted_drives_keep_key_and_headers_on_the_node(every_case: dict[str, list[Manifest]]) -> None:
    mounts = [mount["mountPath"] for mount in service(every_case["encrypted"], "StatefulSet")["volumeMounts"]]
    assert {"/var/lib/mf/h", "/var/lib/mf/keys", "/run/cryptsetup", "/dev"} <= set(mounts)


def test_spdk_in_the_pod_has_its_huge_pages_and_outlives_the_service() -> None:
    items = manifests(SPDK, *NODE, "--spdk-image", "spdk:26.09")
    (target,) = pod(items, "StatefulSet")["initContainers"]
    assert target["restartPolicy"] == "Always", "a sidecar: begins before the service and ends after it"
    assert target["command"] == [
        "nvmf_tgt", "--wait-for-rpc", "-r", "/run/spdk/spdk.sock", "-s", "8192", "-m", "0xf",
    ]  # fmt: skip
    assert target["resources"]["limits"]["hugepages-2Mi"] == "8192Mi"
    assert target["resources"]["requests"]["cpu"] == "4"
    places = {mount["mountPath"] for mount in target["volumeMounts"]}
    assert {"/run/spdk", "/dev/hugepages", "/dev", "/var/lib/meshfusion"} <= places
    assert "/run/spdk" in {mount["mountPath"] for mount in service(items, "StatefulSet")["volumeMounts"]}


def test_spdk_of_the_node_is_reached_by_its_socket() -> None:
    items = manifests(SPDK, *NODE)
    assert "initContainers" not in pod(items, "StatefulSet")
    (volume,) = (v for v in pod(items, "StatefulSet")["volumes"] if v.get("hostPath", {}).get("path") == "/run/spdk")
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("127.0.0.1:9477", "127.0.0.1"),
        ("0.0.0.0:9477", "127.0.0.1"),
        ("[::]:9477", "::1"),
        ("10.0.0.1:9477", "10.0.0.1"),
    ],
)
def test_the_kubelet_asks_where_the_service_tells(listen: str, host: str) -> None:
    config = {**FAR, "telemetry": {"listen": listen, "allow_public": True}}
    found = service(manifests(config, *NODE), "StatefulSet")
    asked = {name: found[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["host"] for probe in asked.values()} == {host}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz",
    }  # fmt: skip
    assert found["livenessProbe"]["timeoutSeconds"] > 2, "/healthz itself waits 2 s for the pools"


def node_of(spec: Manifest) -> Any:
    """The only one that the pod may run on."""
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (field,) = term["matchFields"]
    assert (field["key"], field["operator"], list(term)) == ("metadata.name", "In", ["matchFields"])
    return field["values"]


# ---- where, and how many ----------------------------------------------------------------------------------------


def test_many_nodes_are_changed_one_after_another() -> None:
    items = manifests(NEAR)
    assert one(items, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert pod(items, "DaemonSet")["nodeSelector"] == {"meshfusion.io/storage": "true"}
    assert not [item for item in items if item["kind"] == "PodDisruptionBudget"], "it does not count DaemonSets' pods"


def test_one_budget_holds_for_the_services_of_all_nodes() -> None:
    first, second = (manifests(FAR, "--node", node) for node in ("a", "b"))
    budget = one(first, "PodDisruptionBudget")
    assert budget == one(second, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    selected = budget["spec"]["selector"]["matchLabels"].items()
    for items in (first, second):
        assert selected <= one(items, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    for kind in ("StatefulSet", "ConfigMap"):
        assert one(first, kind)["metadata"]["name"] != one(second, kind)["metadata"]["name"]
    matched = [one(items, "StatefulSet")["spec"]["selector"]["matchLabels"] for items in (first, second)]
    assert matched[0] != matched[1], "none takes the other's pods for its own"
    assert node_of(pod(first, "StatefulSet")) == ["a"]


def test_different_nodes_have_different_names() -> None:
    long = "n" * 60
    nodes = ["a-b", "a.b", "ab", long, long + "x", long[:-1] + "m", "meshfusion"]
    names = [instance_name(node) for node in nodes]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 52 for name in names)
    assert instance_name(None) == "meshfusion"


# ---- engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "more", "before"), [(NEAR, (), ()), (FAR, (*NODE, *RDMA), SHOWN), (NEAR, ("--service", SOCKET), ())]
)
def test_the_engine_has_what_connector_config_writes(
    config: Manifest, more: tuple[str, ...], before: tuple[str, ...], tmp_path: Path
) -> None:
    items = manifests(config, *more, *ENGINE, before=before)
    (engine,) = pod(items, "Deployment")["containers"]
    command = engine["command"]
    assert command[:3] == ["vllm", "serve", "/models/llama"]
    written = json.loads(command[command.index("--kv-transfer-config") + 1])
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(config))
    arguments = [*before, "connector", "config", "--config", str(file), "--format", "json"]
    told = CliRunner().invoke(mfctl, arguments)
    assert written == json.loads(told.stdout)["kv_transfer_config"]
    # What it names is there: the socket's and the pool's directories, or the certificates.
    places = {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert places >= ({"/run/meshfusion", "/var/lib/meshfusion/pool"} if config is NEAR else {"/etc/meshfusion"})
    assert "/models/llama" in places
    # Numbers of processes are alike in pods: where engines tell of themselves by them, they share nothing.
    assert engine["env"] == [{"name": "MESHFUSION_RUN_DIR", "value": "/run/meshfusion-engine"}]
    assert not any(Path("/run/meshfusion-engine").is_relative_to(place) for place in places)


def test_an_engine_over_rdma_gets_the_devices_and_may_keep_memory_in_place() -> None:
    items = manifests(FAR, *NODE, *ENGINE, *RDMA, before=SHOWN)
    (engine,) = pod(items, "Deployment")["containers"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1", "rdma/hca_shared_devices_a": "1"}
    assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert pod(items, "Deployment")["hostNetwork"] is True
    found = pod(items, "Deployment")
    assert "nodeSelector" not in found
    assert "affinity" not in found, "it may run elsewhere than the service"


def test_an_engine_gets_its_tenants_pool_and_no_other() -> None:
    def pool_of(name: str, **more: object) -> Manifest:
        return {"tenants": [name], "pool": {"path": f"/var/lib/meshfusion/{name}", **more}}

    pools = {"red": pool_of("red"), "blue": pool_of("blue", data_path="/srv/kv/blue.data")}
    config = {key: value for key, value in NEAR.items() if key != "pool"} | {
        "pools": pools,
        "audit": {"path": "/var/log/meshfusion/audit.log"},
    }
    for tenant, own in (
        ("red", {"/var/lib/meshfusion/red"}),
        ("blue", {"/var/lib/meshfusion/blue", "/srv/kv/blue.data"}),
    ):
        items = manifests(config, *ENGINE, "--tenant", tenant)
        check(one(items, "Deployment"))
        (engine,) = pod(items, "Deployment")["containers"]
        places = {mount["mountPath"] for mount in engine["volumeMounts"]}
        assert places == {"/dev/shm", "/run/meshfusion", "/models/llama", *own}
        assert "privileged" not in engine["securityContext"]


def test_an_engine_of_the_machine_opens_drives_as_the_service_does() -> None:
    config = {**NEAR, "pool": {**POOL, "data_path": "/dev/nvme1n1"}}
    (engine,) = pod(manifests(config, *ENGINE), "Deployment")["containers"]
    assert engine["securityContext"]["privileged"] is True
    assert "/dev" in {mount["mountPath"] for mount in engine["volumeMounts"]}
    over_rdma = {**config, "listen": SOCKET, "exports": FAR["exports"]}
    (engine,) = pod(manifests(over_rdma, *NODE, *ENGINE, *RDMA), "Deployment")["containers"]
    assert "privileged" not in engine["securityContext"], "the target opens them"
    assert "/var/lib/meshfusion/pool" not in {mount["mountPath"] for mount in engine["volumeMounts"]}


def test_an_spdk_socket_beside_the_services_own_is_the_nodes_too() -> None:
    spdk = {"socket": "/run/meshfusion/spdk.sock", "memory": "8GiB"}
    items = manifests({**SPDK, "exports": {**SPDK["exports"], "spdk": spdk}}, *NODE, "--spdk-image", "spdk:1")
    check(one(items, "StatefulSet"))
    assert "target" not in [volume["name"] for volume in pod(items, "StatefulSet")["volumes"]]


def test_an_engine_on_a_socket_runs_where_the_service_does() -> None:
    items = manifests(NEAR, *ENGINE, "--gpus", "0")
    assert pod(items, "Deployment")["nodeSelector"] == pod(items, "DaemonSet")["nodeSelector"]
    assert pod(items, "Deployment")["containers"][0]["resources"]["limits"] == {}


# ---- monitoring, DPUs -------------------------------------------------------------------------------------------


def test_the_rules_are_the_alerts_and_the_job_is_theirs() -> None:
    items = manifests({**NEAR, "telemetry": PUBLIC}, "--monitoring", "--monitor-label", "release=prometheus")
    rules = [rule for group in one(items, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    (endpoint,) = one(items, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "meshfusion", "action": "replace"} in endpoint["relabelings"]
    assert endpoint["port"] in [port["name"] for port in service(items, "DaemonSet")["ports"]]
    selected = one(items, "PodMonitor")["spec"]["selector"]["matchLabels"].items()
    assert selected <= one(items, "DaemonSet")["spec"]["template"]["metadata"]["labels"].items()
    for kind in ("PodMonitor", "PrometheusRule"):
        assert one(items, kind)["metadata"]["labels"]["release"] == "prometheus"


def test_a_dpu_is_given_the_manifests_as_the_charts_values() -> None:
    items = manifests(FAR, "--node", "dpu-1", "--dpf-chart", CHART)
    spec = one(items, "DPUService")["spec"]
    assert spec["helmChart"]["source"]["repoURL"] == CHART
    inner = spec["helmChart"]["values"]["manifests"]
    assert [item["kind"] for item in inner] == ["ConfigMap", "DaemonSet"]
    labels = one(inner, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert labels["svc.dpu.nvidia.com/service"] == spec["serviceID"], "DPF lets no other pod in"
    assert node_of(pod(inner, "DaemonSet")) == ["dpu-1"]
    assert spec["security"] == {"privileged": True}
    (modules,) = one(items, "DPUFlavor")["spec"]["configFiles"]
    assert modules["raw"] == "nvmet\nnvmet-rdma\n"
    no_devices = manifests({**FAR, "pool": POOL}, "--node", "dpu-1", "--dpf-chart", CHART)
    assert one(no_devices, "DPUService")["spec"]["security"] == {"privileged": False}


def test_a_dpu_with_spdk_boots_with_its_huge_pages() -> None:
    items = manifests(SPDK, "--node", "dpu-1", "--dpf-chart", CHART, "--spdk-image", "spdk:26.09")
    parameters = one(items, "DPUFlavor")["spec"]["grub"]["kernelParameters"]
    assert "hugepages=4096" in parameters, "8 GiB of 2 MiB"
    assert any(parameter.startswith("console=") for parameter in parameters)
    assert "configFiles" not in one(items, "DPUFlavor")["spec"]
