"""``mfctl connector config``: what it writes is what an engine takes, and nothing is written that nobody could use."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.dpu.yaml_document import parse_yaml
from meshfusion.host.connector.config import parse_connector_config
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools import engine_check, engine_check_child
from meshfusion.tools.engine_check import check_engine
from meshfusion.tools.mfctl.connector_config import check_connector_config
from meshfusion.tools.mfctl.findings import Finding, State
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.security.authority import Authority, replace

SOCKET = "unix:///run/meshfusion/meshfusion.sock"
POOL = {"path": "/var/lib/meshfusion/pool"}
EXPORTS = {"target": "nvmet", "portals": ["rdma://10.0.0.1:4420"]}
TLS = {"certificate": "/etc/s.pem", "key": "/etc/s.key", "client_ca": "/etc/ca.pem"}
FAR = {"listen": "10.0.0.1:7700", "pool": POOL, "tls": TLS, "exports": EXPORTS}
ENGINE = {"subject": "engine-1", "role": "engine"}
SHOWN = ("--service-ca", "/etc/ca.pem", "--service-certificate", "/etc/e.pem", "--service-key", "/etc/e.key")


def run(*arguments: str, before: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(mfctl, [*before, "connector", "config", *arguments])


def written(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    return body


def extra_of(body: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = body["kv_transfer_config"]["kv_connector_extra_config"]
    return extra


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "service.yaml"


def write(path: Path, **config: Any) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


# ---- what is written ---------------------------------------------------------------------------------------------


def test_a_service_of_this_machine_by_its_address() -> None:
    result = run("--service", SOCKET, "--format", "json")
    body = written(result)
    assert body["kv_transfer_config"] == {
        "kv_connector": "MeshFusionConnector",
        "kv_connector_module_path": "meshfusion.host.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"service": SOCKET},
    }
    assert any("as that user" in note for note in body["notes"])
    assert any("not known from its address" in note for note in body["notes"])


def test_what_is_written_passes_the_check_of_configurations(tmp_path: Path) -> None:
    body = written(run("--service", "127.0.0.1:7700", "--tenant", "red", "--format", "json"))
    path = tmp_path / "transfer.json"
    path.write_text(json.dumps(body["kv_transfer_config"]))
    checked = CliRunner().invoke(mfctl, ["config", "check", "--connector", str(path)])
    assert checked.exit_code == 0, checked.output
    assert parse_connector_config(extra_of(body)).tenant == "red"


def test_the_line_of_the_shell_gives_the_engine_the_same(tmp_path: Path) -> None:
    body = written(run("--service", "unix:///run/it's here/s.sock", "--format", "json"))
    words = shlex.split(body["command"])
    assert words[:3] == ["vllm", "serve", "MODEL"]
    assert words[3] == "--kv-transfer-config"
    assert json.loads(words[4]) == body["kv_transfer_config"]
    assert len(words) == 5


def test_the_table_is_json_and_a_line_of_the_shell() -> None:
    result = run("--service", SOCKET)
    text, _, command = result.stdout.partition("\n\n")
    assert json.loads(text) == json.loads(shlex.split(command)[4])
    assert "note: a unix socket" in result.stderr


def test_yaml_and_json_are_the_same() -> None:
    of_yaml = yaml.safe_load(run("--service", SOCKET, "--format", "yaml").stdout)
    assert of_yaml == written(run("--service", SOCKET, "--format", "json"))


def test_a_service_elsewhere_from_its_configuration(config_file: Path) -> None:
    name = write(config_file, **FAR, access=[ENGINE])
    body = written(run("--config", name, "--format", "json", before=SHOWN))
    assert extra_of(body) == {
        "service": "10.0.0.1:7700",
        "service_tls": {"ca": "/etc/ca.pem", "certificate": "/etc/e.pem", "key": "/etc/e.key"},
        "path": "rdma",
    }
    assert body["notes"] == []


def test_relative_files_are_told_as_absolute_ones(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config_file.parent)
    name = write(config_file, **{**FAR, "tls": {**TLS, "client_ca": None}}, tokens_file="/absent/tokens")
    before = ("--service-ca", "ca.pem", "--service-token-file", "e.token", "--service-server-name", "service")
    body = written(run("--config", name, "--format", "json", before=before))
    assert extra_of(body)["service_tls"] == {"ca": str(config_file.parent / "ca.pem"), "server_name": "service"}
    assert extra_of(body)["service_token_file"] == str(config_file.parent / "e.token")
    assert any("/absent/tokens cannot be read here" in note for note in body["notes"])


def test_tokens_of_engines_are_looked_for(config_file: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    name = write(config_file, listen="127.0.0.1:7700", pool=POOL, tokens_file=str(tokens))
    before = ("--service-token-file", "/etc/e.token")
    replace(tokens, yaml.safe_dump([{"name": "o", "sha256": "0" * 64, "role": "operator"}]).encode(), mode=0o600)
    refused = run("--config", name, before=before)
    assert refused.exit_code == 1
    assert "lets in no caller with the role engine and the tenant default" in refused.stderr
    replace(tokens, yaml.safe_dump([{"name": "e", "sha256": "0" * 64, "role": "engine"}]).encode(), mode=0o600)
    assert extra_of(written(run("--config", name, "--format", "json", before=before)))["service"] == "127.0.0.1:7700"


POOLS = {
    "red": {"tenants": ["red"], "pool": {"path": "/var/lib/meshfusion/red"}},
    "lab": {"tenants": ["blue", "green"], "pool": {"path": "/var/lib/meshfusion/lab"}},
}


def test_a_tenant_of_several(config_file: Path) -> None:
    name = write(config_file, listen=SOCKET, pools=POOLS, audit={"path": "/var/log/a"})
    assert extra_of(written(run("--config", name, "--tenant", "green", "--format", "json")))["tenant"] == "green"
    unnamed = run("--config", name)
    assert unnamed.exit_code == 1
    assert "pools for several tenants, and none is named" in unnamed.stderr
    assert "Give --tenant, one of blue, green, red." in unnamed.stderr
    assert "tenant grey has no pool in it" in run("--config", name, "--tenant", "grey").stderr


def test_of_several_addresses_the_one_that_all_engines_reach(config_file: Path) -> None:
    name = write(config_file, **{**FAR, "listen": [SOCKET, "10.0.0.1:7700"], "access": [ENGINE]})
    extra = extra_of(written(run("--config", name, "--format", "json", before=SHOWN)))
    assert (extra["service"], extra["service_tls"]["ca"]) == ("10.0.0.1:7700", "/etc/ca.pem")
    extra = extra_of(written(run("--config", name, "--service", SOCKET, "--format", "json")))  # nobody is asked there
    assert extra["service"] == SOCKET
    assert "service_tls" not in extra


def test_the_address_on_the_line_goes_before_the_one_in_the_file(config_file: Path) -> None:
    name = write(config_file, **{**FAR, "listen": "0.0.0.0:7700"}, access=[ENGINE])
    refused = run("--config", name, before=SHOWN)
    assert refused.exit_code == 1
    assert "listen = 0.0.0.0:7700 is no address that engines could connect to" in refused.stderr
    assert "--service HOST:PORT" in refused.stderr
    body = written(run("--config", name, "--service", "store-7:7700", "--format", "json", before=SHOWN))
    assert extra_of(body)["service"] == "store-7:7700"


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::]:7700"])
def test_addresses_that_nobody_could_connect_to(config_file: Path, listen: str) -> None:
    near = {"listen": listen, "pool": POOL} if listen.endswith(":0") else {**FAR, "listen": listen, "access": [ENGINE]}
    result = run("--config", write(config_file, **near), before=() if listen.endswith(":0") else SHOWN)
    assert result.exit_code == 1
    assert "is no address that engines could connect to" in result.stderr


def test_a_service_without_exports_is_told_to_have_no_data_for_others(config_file: Path) -> None:
    name = write(config_file, **{**FAR, "exports": None}, access=[ENGINE])
    body = written(run("--config", name, "--format", "json", before=SHOWN))
    assert "path" not in extra_of(body)
    assert any("exports nothing" in note for note in body["notes"])


# ---- what no engine could use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ((), "the service speaks TLS, and --service-ca is not given"),
        (SHOWN[:2], "asks callers for a certificate, and --service-certificate is not given"),
        (SHOWN[:4], "--service-key is missing: a certificate and its key belong together"),
    ],
)
def test_what_the_service_asks_for_and_the_engine_does_not_show(
    config_file: Path, before: tuple[str, ...], said: str
) -> None:
    result = run("--config", write(config_file, **FAR, access=[ENGINE]), before=before)
    assert result.exit_code == 1
    assert said in result.stderr
    assert "next step: " in result.stderr
    assert result.stdout == ""


def test_nobody_of_the_tenant_is_let_in(config_file: Path) -> None:
    name = write(config_file, **FAR, access=[{"subject": "operator", "role": "operator"}])
    result = run("--config", name, before=SHOWN)
    assert result.exit_code == 1
    assert "lets in no caller with the role engine" in result.stderr


def test_a_token_is_asked_for(config_file: Path) -> None:
    name = write(config_file, listen="127.0.0.1:7700", pool=POOL, tokens_file="/absent/tokens")
    result = run("--config", name)
    assert result.exit_code == 1
    assert "--service-token-file is not given" in result.stderr
    assert "mfctl token create" in result.stderr


def test_tls_that_the_service_does_not_speak(config_file: Path) -> None:
    name = write(config_file, listen="127.0.0.1:7700", pool=POOL)
    result = run("--config", name, before=SHOWN)
    assert result.exit_code == 1
    assert "the service speaks no TLS" in result.stderr


def test_a_far_address_without_tls_is_refused_in_the_words_of_the_command() -> None:
    result = run("--service", "10.0.0.1:7700")
    assert result.exit_code == 1
    assert "--service-ca is missing: 10.0.0.1:7700 is not on this machine" in result.stderr
    assert "mfctl --service-ca FILE connector config" in result.stderr


@pytest.mark.parametrize("arguments", [("--service", "nowhere"), ("--service", "a:1"), ("--service", "unix:relative")])
def test_bad_addresses(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert "next step: " in result.stderr


def test_a_bad_tenant_and_no_service_at_all() -> None:
    refused = run("--service", SOCKET, "--tenant", "a b")
    assert refused.exit_code == 1
    assert "--tenant: 'a b' is no name" in refused.stderr
    assert run().exit_code == 2


def test_a_bad_configuration_tells_all_that_is_wrong(config_file: Path) -> None:
    result = run("--config", write(config_file, listen=SOCKET, pol=POOL))
    assert result.exit_code == 1
    assert "did you mean pool?" in result.stderr


def test_there_is_no_connector_for_sglang() -> None:
    result = run("--service", SOCKET, "--engine", "sglang", "--format", "json")
    assert result.exit_code == 1
    assert result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert error["kind"] == "UnsupportedError"
    assert "no connector for SGLang" in error["message"]
    assert "--engine vllm" in error["next_step"]


# ---- the installed engine ----------------------------------------------------------------------------------------


GOOD = (Finding("vllm", State.OK, "/somewhere"),)
BAD = (*GOOD, Finding("vllm version", State.FAIL, "vLLM 9.9 is not proven", "Install another."))


@pytest.mark.parametrize(("findings", "code"), [(GOOD, 0), (BAD, 1)])
def test_what_the_engine_says_is_shown_and_decides(
    monkeypatch: pytest.MonkeyPatch, findings: tuple[Finding, ...], code: int
) -> None:
    asked: list[Any] = []

    def answer(transfer: Any, *, deadline_s: float) -> tuple[Finding, ...]:
        asked.append(transfer)
        return findings

    monkeypatch.setattr(engine_check, "check_engine", answer)
    result = run("--service", SOCKET, "--check")
    assert result.exit_code == code
    assert asked[0]["kv_connector_extra_config"] == {"service": SOCKET}
    for finding in findings:
        assert finding.cause in result.stdout
        assert finding.remedy in result.stdout
    body = json.loads(run("--service", SOCKET, "--check", "--format", "json").stdout)
    assert body["ok"] == (code == 0)
    assert [check["state"] for check in body["checks"]] == [finding.state.value for finding in findings]


def test_files_of_the_engine_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "check_engine", lambda transfer, deadline_s: GOOD)
    ca = Authority(tmp_path)
    engine = ca.issue("engine-1")
    before = (
        "--service-ca", str(ca.path), "--service-certificate", str(engine.certificate), "--service-key",
        str(engine.key),
    )  # fmt: skip
    assert run("--service", "10.0.0.1:7700", "--check", before=before).exit_code == 0
    engine.key.chmod(0o644)
    result = run("--service", "10.0.0.1:7700", "--check", before=before)
    assert result.exit_code == 1
    assert "service_tls.key" in result.stdout


TRANSFER = {
    "kv_connector": "MeshFusionConnector",
    "kv_connector_module_path": "meshfusion.host.connector.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"service": SOCKET},
}


def test_the_installed_engine_takes_it() -> None:
    found = check_engine(TRANSFER, deadline_s=240)
    assert [finding.state for finding in found] == [State.OK] * 6, found
    assert found[4].cause == "meshfusion.host.connector.vllm.connector.MeshFusionConnector"


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        ({"kv_role": "kv_all"}, "kv_transfer_config", "kv_all"),
        ({"no_such_key": 1}, "kv_transfer_config", "no_such_key"),
        ({"kv_connector": "OtherConnector"}, "connector", "OtherConnector not found"),
        ({"kv_connector_module_path": "no.such.module"}, "connector", "No module named"),
        ({"kv_connector_extra_config": {"servce": SOCKET}}, "connector's configuration", "did you mean service"),
    ],
)
def test_what_the_engine_does_not_take_is_its_own_word(change: dict[str, Any], check: str, said: str) -> None:
    """In this process: one import of the engine for all of them."""
    *passed, last = engine_check_child.examine({**TRANSFER, **change})
    assert all(step.state == "ok" for step in passed)
    assert (last.check, last.state) == (check, "fail")
    assert said in last.cause
    assert last.remedy


def test_an_engine_of_another_version_and_a_variable_that_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.host.kv.identity.installed_engine_version", lambda: "0.99.1")
    *_, last = engine_check_child.examine(TRANSFER)
    assert (last.check, last.state) == ("vllm version", "fail")
    assert "0.99.1 is not one of the proven versions" in last.cause
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    *_, last = engine_check_child.examine(TRANSFER)
    assert (last.check, last.state) == ("environment", "fail")


def test_a_machine_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    (only,) = engine_check_child.examine(TRANSFER)
    assert (only.check, only.state) == ("vllm", "fail")
    assert "no vLLM in this Python" in only.cause


def test_an_engine_that_hangs_or_dies_is_one_error() -> None:
    hanging = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(MeshFusionError, match=r"could not be asked within 0\.5 s"):
        check_engine(TRANSFER, deadline_s=0.5, child=hanging)
    dying = (sys.executable, "-c", "import sys; sys.exit('the driver is gone')")
    with pytest.raises(MeshFusionError, match="ended with 1: the driver is gone"):
        check_engine(TRANSFER, deadline_s=60, child=dying)


def test_our_own_check_of_a_whole_configuration_agrees() -> None:
    assert check_connector_config(parse_yaml(json.dumps(TRANSFER), "x"), "x") == ((), ())
