"""What no pod could do is refused before anything is written, all at once and by field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfusion.tools.mfctl.main import mfctl
from tests.tools.k8s.cases import CHART, ENGINE, FAR, NEAR, POOL, SHOWN, SPDK, TLS, Manifest, render

NODE = ("--node", "storage-1")
NO_TELEMETRY = {key: value for key, value in NEAR.items() if key != "telemetry"}


@pytest.mark.parametrize(
    ("config", "more", "told"),
    [
        (NO_TELEMETRY, (), "telemetry.listen: is not set"),
        ({**NEAR, "telemetry": {"listen": "unix:///run/meshfusion/t.sock"}}, (), "telemetry.listen"),
        ({**NEAR, "telemetry": {"listen": "127.0.0.1:9477", "probe": False}}, (), "telemetry.probe = "),
        ({**NEAR, "telemetry": {"listen": "127.0.0.1:0"}}, (), "any free port"),
        ({**NEAR, "pool": {**POOL, "path": "/var/lib/pool"}}, (), "pool.path: lies in /var/lib"),
        ({**NEAR, "pool": {**POOL, "path": "/pool"}}, (), "pool.path: lies in /,"),
        ({**NEAR, "listen": "unix:///run/s"}, (), "listen: lies in /run"),
        ({**NEAR, "log": {"file": "/var/log/mf.log"}}, (), "log.file: lies in /var/log"),
        ({**NEAR, "log": {"file": "/etc/meshfusion/mf.log"}}, (), "log.file: lies in /etc/meshfusion"),
        ({**NEAR, "pool": {**POOL, "data_path": "/usr/local/data"}}, (), "pool.data_path: lies in /usr/local"),
        ({**NEAR, "pool": {**POOL, "path": "/srv/x/../kv/pool"}}, (), "pool.path: lies in /srv/x/../kv"),
        ({**NEAR, "pool": {**POOL, "path": "/srv/a:b/pool"}}, (), "pool.path: lies in /srv/a:b"),
        ({**NEAR, "pool": {**POOL, "data_path": "/dev/../srv/data"}}, (), "pool.data_path: lies in /dev/../srv"),
        (FAR, (), "exports.portals = 'rdma://10.0.0.1:4420, rdma://10.0.1.1:4420': are addresses of one node"),
        (FAR, (), "listen = '10.0.0.1:7700': is an address of one node"),
        ({**FAR, "tls": {**TLS, "key": "/srv/keys/service.key"}}, NODE, "tls.key = "),
        ({**FAR, "tls": {**TLS, "key": "/etc/meshfusion/../keys/service.key"}}, NODE, "tls.key = "),
        ({**FAR, "tls": {**TLS, "client_ca": "/etc/meshfusion/callers/service.pem"}}, NODE, "tls.client_ca = "),
        ({**FAR, "tls": {**TLS, "key": "/etc/meshfusion/service.yaml"}}, NODE, "tls.key = "),
        (FAR, (*NODE, "--spdk-image", "spdk:1"), "exports.target: is not spdk"),
        ({**SPDK, "exports": {**SPDK["exports"], "spdk": {"socket": "/var/tmp/spdk.sock", "memory": "8GiB"}}}, NODE,
         "exports.spdk.socket: lies in /var/tmp"),
        (NEAR, ("--monitoring",), "telemetry.listen = '127.0.0.1:9477': is the node's own"),
        (NEAR, (*NODE, "--dpf-chart", CHART), "listen: is a socket, and a DPU's engines"),
    ],
)  # fmt: skip
def test_a_configuration_that_no_pod_could_have(config: Manifest, more: tuple[str, ...], told: str) -> None:
    result = render(config, *more)
    assert result.exit_code == 1, result.output
    assert result.stdout == "", "nothing half done"
    assert told in result.stderr
    assert "; " in result.stderr, "with a way out"


def test_all_problems_are_told_at_once_and_to_programs_too() -> None:
    config = {**FAR, "pool": {**POOL, "path": "/var/lib/pool"}, "telemetry": {}}
    result = render(config, "--format", "json")
    problems = json.loads(result.stderr)["error"]["problems"]
    assert [problem["field"] for problem in problems] == ["telemetry.listen", "pool.path", "exports.portals", "listen"]
    assert all(problem["fix"] for problem in problems)


def test_an_spdk_socket_in_the_pod_may_lie_anywhere() -> None:
    """It is of the pod alone then."""
    exports = {**SPDK["exports"], "spdk": {"socket": "/var/tmp/spdk.sock", "memory": "8GiB"}}
    result = render({**SPDK, "exports": exports}, *NODE, "--spdk-image", "spdk:1")
    assert result.exit_code == 0, result.output


def test_what_the_service_would_refuse_is_refused_here() -> None:
    for config, told in (
        ({**NEAR, "pol": POOL}, "pol"),
        ({**NEAR, "stop_grace_s": "10"}, "stop_grace_s"),
        ({"listen": NEAR["listen"]}, "pool"),
    ):
        result = render(config)
        assert (result.exit_code, result.stdout) == (1, "")
        assert told in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(mfctl, ["k8s", "render", "--config", str(tmp_path / "no.yaml"), "--image", "m:1"])
    assert result.exit_code == 1
    assert "no such file" in result.stderr


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--node", "Storage_1"), "no name of a node"),
        (("--node", "a..b"), "no name of a node"),
        (("--namespace", "a.b"), "no namespace"),
        (("--memory", "1"), "less than 1MiB"),
        (("--memory", "much"), "--memory"),
        (("--drain", "nan"), "not a finite number"),
        (("--drain", "-1"), "--drain"),
        (("--monitoring", "--monitor-label", "release"), "no label"),
        (("--monitor-label", "release=x"), "for --monitoring"),
        (("--engine-image", "e:1"), "go together"),
        (("--rdma-resource", "rdma/x"), "is for the engine"),
        (("--service", "unix:///s"), "--service is for the engine"),
        (("--dpf-chart", CHART), "add --node"),
        (("--dpf-chart", "file:///x", *NODE), "oci://"),
        (("--dpf-chart", CHART, *NODE, "--monitoring"), "another cluster"),
    ],
)
def test_wrong_usage(more: tuple[str, ...], told: str) -> None:
    result = render(NEAR, *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_an_engine_that_could_not_attach_is_not_written() -> None:
    refused = render(FAR, *NODE, *ENGINE)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--service-ca" in refused.stderr
    no_devices = render(FAR, *NODE, *ENGINE, before=SHOWN)
    assert (no_devices.exit_code, no_devices.stdout) == (1, "")
    assert "--rdma-resource: is not given" in no_devices.stderr
    elsewhere = tuple(word.replace("/etc/meshfusion/tls", "/root") for word in SHOWN)
    misplaced = render(FAR, *NODE, *ENGINE, "--rdma-resource", "rdma/x", before=elsewhere)
    assert (misplaced.exit_code, misplaced.stdout) == (1, "")
    assert misplaced.stderr.count("comes from a Secret, which is mounted there") == 3


# ---- the chart --------------------------------------------------------------------------------------------------


def test_the_chart_is_written_with_the_version_and_never_over_another(tmp_path: Path) -> None:
    def write() -> tuple[int, str]:
        result = CliRunner().invoke(mfctl, ["k8s", "chart", "--output", str(tmp_path), "--format", "json"])
        return result.exit_code, result.stdout or result.stderr

    code, text = write()
    assert code == 0, text
    told = json.loads(text)
    chart = Path(told["chart"])
    assert f"version: {told['version']}\n" in (chart / "Chart.yaml").read_text()
    assert "@" not in (chart / "Chart.yaml").read_text()
    assert "range .Values.manifests" in (chart / "templates" / "manifests.yaml").read_text()
    (chart / "values.yaml").write_text("mine")
    assert write()[0] == 1
    assert (chart / "values.yaml").read_text() == "mine"
