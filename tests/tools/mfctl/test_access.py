"""mfctl before a service that asks who calls; tokens made; the audit log shown; the daemon over TLS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.dpu.access.audit_log import AuditLog
from meshfusion.dpu.access.tokens_file import TokensFile, read_tokens
from meshfusion.dpu.api.security.guard import Caller, Guard
from meshfusion.dpu.api.security.identity import CallerIdentity
from meshfusion.dpu.api.security.principal import LOCAL
from meshfusion.dpu.api.security.roles import RULES
from meshfusion.dpu.api.security.token_text import digest_of
from meshfusion.dpu.api.server import serve
from meshfusion.tools.mfctl import support_parts
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.api.fake_service import FakeChunkService
from tests.dpu.security.authority import Authority, Pair, replace


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(mfctl, list(arguments), env=env)


def test_a_token_and_its_entry(tmp_path: Path) -> None:
    made = json.loads(run("token", "create", "engine-1", "--role", "engine", "--format", "json").stdout)
    assert made["entry"] == {
        "name": "engine-1", "sha256": digest_of(made["token"]), "role": "engine", "tenant": "default",
    }  # fmt: skip
    path = tmp_path / "token"
    entry = run("token", "create", "o", "--role", "operator", "--tenant", "t", "--output", str(path)).stdout
    token = path.read_text().strip()
    assert token != made["token"]
    tokens_file = tmp_path / "tokens"
    replace(tokens_file, entry.encode(), mode=0o600)
    (read,) = read_tokens(tokens_file)
    assert (read.name, read.sha256, read.role, read.tenant) == ("o", digest_of(token), "operator", "t")
    assert token not in entry


def test_a_token_is_printed_on_a_terminal_only(tmp_path: Path) -> None:
    """With >> tokens.yaml it would stand in the file that holds digests."""
    refused = run("token", "create", "o", "--role", "operator")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "no terminal: --output FILE for the token" in refused.stderr
    command = f"{sys.executable} -m meshfusion.tools.mfctl.main token create o --role operator"
    typed = subprocess.run(["script", "-qec", command, "/dev/null"], capture_output=True, text=True, timeout=60)
    token = typed.stdout.splitlines()[0].strip()
    assert f"sha256: {digest_of(token)}" in typed.stdout


def test_a_token_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    result = run("token", "create", "e", "--role", "engine", "--output", str(path))
    (entry,) = yaml.safe_load(result.stdout)
    assert digest_of(path.read_text().strip()) == entry["sha256"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() not in result.output
    again = run("token", "create", "e", "--role", "engine", "--output", str(path))
    assert (again.exit_code, again.stderr.splitlines()[0]) == (1, f"error: --output: {path} exists")
    assert run("token", "create", "", "--role", "engine").exit_code == 2
    assert run("token", "create", "e", "--role", "root").exit_code == 2


class Daemon:
    """A service as a process, over TLS on a loopback port, with certificates and tokens."""

    def __init__(self, folder: Path, *, listen: str | list[str] = "127.0.0.1:0", **environment: str) -> None:
        self.ca = Authority(folder)
        self.operator, self.reader = self.ca.issue("operator"), self.ca.issue("reader")
        self.server = server = self.ca.issue("server")
        self.pool = folder / "pool"
        config = {
            "listen": listen,
            "pool": {"path": str(self.pool), "create": True, "size": "16MiB", "segment_size": "2MiB"},
            "tls": {"certificate": str(server.certificate), "key": str(server.key), "client_ca": str(self.ca.path)},
            "access": [{"subject": "operator", "role": "operator"}, {"subject": "reader", "role": "read-only"}],
        }
        path = folder / "service.yaml"
        path.write_text(yaml.safe_dump(config))
        code = "from meshfusion.tools.mfctl.main import service_main; service_main()"
        command = [sys.executable, "-c", code, "--config", str(path), "--format", "json"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        assert self._process.stdout is not None
        timer = threading.Timer(60.0, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        assert line, self._process.communicate()[1]
        ready = json.loads(line)
        self.address: str = ready["address"]
        self.addresses: list[str] = ready.get("addresses", [self.address])

    def options(self, pair: Pair) -> list[str]:
        return [
            *("--service-ca", str(self.ca.path), "--service-certificate", str(pair.certificate)),
            *("--service-key", str(pair.key)),
        ]

    def close(self) -> str:
        """What it wrote to standard error."""
        self._process.terminate()
        return self._process.communicate(timeout=30)[1]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.close()


def test_a_token_on_a_unix_socket_which_has_no_tls(tmp_path: Path) -> None:
    made = run("token", "create", "looker", "--role", "read-only", "--output", str(tmp_path / "token"))
    replace(tmp_path / "tokens", made.stdout.encode(), mode=0o600)
    guard = Guard(CallerIdentity(find_token=TokensFile(tmp_path / "tokens").find))
    server = serve(FakeChunkService(), f"unix://{tmp_path}/s", guard=guard)
    asked = ["pool", "status", "--service", server.address, "--format", "json"]
    environment = {"MESHFUSION_SERVICE_CA": "/none", "MESHFUSION_SERVICE_TOKEN_FILE": str(tmp_path / "token")}
    assert run(*asked, env=environment).exit_code == 0
    bare = run(*asked)
    assert (bare.exit_code, error_of(bare)["kind"]) == (1, "UnauthenticatedError")
    server.stop(0.0)


def error_of(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stderr)["error"]
    return found


def test_a_service_over_tls(daemon: Daemon) -> None:
    shown = run(*daemon.options(daemon.reader), "pool", "status", "--service", daemon.address, "--format", "json")
    assert json.loads(shown.stdout)["path"] == str(daemon.pool)
    names = ("ca", daemon.ca.path), ("certificate", daemon.reader.certificate), ("key", daemon.reader.key)
    env = {f"MESHFUSION_SERVICE_{name.upper()}": str(path) for name, path in names}
    assert run("pool", "status", "--service", daemon.address, env=env).exit_code == 0
    assert run("jbof", "drives", str(daemon.pool), env=env).exit_code == 0, "found by the pool, and called alike"
    assert run("pool", "status", str(daemon.pool), env=env).exit_code == 0, "no service is asked"


def test_a_bad_new_certificate_is_an_event(daemon: Daemon) -> None:
    good = daemon.server.certificate.read_bytes()
    asked = [*daemon.options(daemon.reader), "events", "--service", daemon.address, "--format", "json"]
    try:
        replace(daemon.server.certificate, b"rubbish")
        for _ in range(2):  # the first is answered while the file is looked at
            shown = run(*asked)
    finally:
        replace(daemon.server.certificate, good)
    (told,) = [event for event in json.loads(shown.stdout) if event["kind"] == "certificate_problem"]
    assert told["severity"] == "warning"
    assert told["text"].startswith(f"tls: tls.certificate = {daemon.server.certificate}: ")
    assert "BEGIN" not in told["text"]


def test_what_mfctl_lacks_is_said(daemon: Daemon) -> None:
    bare = run("pool", "status", "--service", daemon.address, "--format", "json")
    assert (bare.exit_code, error_of(bare)["kind"]) == (5, "ServiceUnavailableError")
    assert "--service-ca of mfctl" in error_of(bare)["next_step"]
    only_ca = run(
        "--service-ca", str(daemon.ca.path), "pool", "status", "--service", daemon.address, "--format", "json"
    )
    assert (only_ca.exit_code, "client_ca" in error_of(only_ca)["next_step"]) == (5, True)
    options = ["--service-certificate", str(daemon.reader.certificate)]
    half = run(*options, "pool", "status", "--service", daemon.address, "--format", "json")
    assert "--service-key: is missing" in error_of(half)["message"]
    none = run("--service-ca", "/none", "pool", "status", "--service", daemon.address, "--format", "json")
    assert "--service-ca = /none: does not exist" in error_of(none)["message"]
    far = run("pool", "status", "--service", "10.0.0.1:7700", "--format", "json")
    assert "--service-ca: is missing: 10.0.0.1:7700 is not on this machine" in error_of(far)["message"]


@pytest.mark.parametrize(("environment", "is_told"), [({}, False), ({"GRPC_VERBOSITY": "INFO"}, True)])
def test_a_handshake_that_fails_is_told_where_the_document_says(
    tmp_path: Path, environment: dict[str, str], is_told: bool
) -> None:
    daemon = Daemon(tmp_path, **environment)
    only_ca = run("--service-ca", str(daemon.ca.path), "pool", "status", "--service", daemon.address)
    assert only_ca.exit_code == 5
    assert ("PEER_DID_NOT_RETURN_A_CERTIFICATE" in daemon.close()) == is_told


def test_operators_on_the_machine_need_nothing_to_show_on_a_socket_beside(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, listen=[f"unix://{tmp_path}/s", "127.0.0.1:0"])
    try:
        port = daemon.addresses[1]
        assert daemon.address == daemon.addresses[0] == f"unix://{tmp_path}/s"
        assert run("pool", "status", "--service", daemon.address).exit_code == 0
        assert run("pool", "status", "--service", port).exit_code == 5, "over TLS nobody gets in without"
        shown = run(*daemon.options(daemon.reader), "pool", "status", "--service", port)
        assert shown.exit_code == 0, shown.stderr
        added = run("jbof", "add", str(daemon.pool), "--size", "16MiB")
        assert added.exit_code == 0, "the pool names the socket"
        config = str(tmp_path / "service.yaml")
        assert run("service", "status", "--config", config).exit_code == 0
        assert run("service", "reload", "--config", config).exit_code == 0
        unit = run("service", "unit", "--config", config, "--user", "root").stdout
        assert "ExecReload=" in unit
        assert "service reload" in unit, "as the service's user, who can call on the socket"
        calls = json.loads(run("audit", "show", str(daemon.pool / "audit.log"), "--format", "json").stdout)["calls"]
        assert {(call["principal"], call["rpc"]) for call in calls} == {
            ("local", "DriveAdmin.AddDrive"), ("local", "ServiceAdmin.Reload")
        }  # fmt: skip
        drained = run("service", "drain", "--config", config, "--deadline", "5")
        assert drained.exit_code == 0, drained.stderr
    finally:
        daemon.close()
    assert not (tmp_path / "s").exists()
    assert run(*daemon.options(daemon.reader), "pool", "status", "--service", port).exit_code == 5


def test_roles_and_the_record(daemon: Daemon) -> None:
    refused = run(*daemon.options(daemon.reader), "jbof", "drain", str(daemon.pool), "0", "--yes", "--format", "json")
    assert (refused.exit_code, error_of(refused)["kind"]) == (1, "PermissionDeniedError")
    added = run(*daemon.options(daemon.operator), "jbof", "add", str(daemon.pool), "--size", "16MiB")
    assert added.exit_code == 0, added.stderr
    assert run(*daemon.options(daemon.operator), "jbof", "remove", str(daemon.pool), "7", "--yes").exit_code == 1
    log = str(daemon.pool / "audit.log")
    calls = json.loads(run("audit", "show", log, "--format", "json").stdout)["calls"]
    assert [(c["principal"], c["rpc"], c["outcome"]) for c in calls[-3:]] == [
        ("certificate:reader", "DriveAdmin.DrainDrive", "PermissionDeniedError"),
        ("certificate:operator", "DriveAdmin.AddDrive", "ok"),
        ("certificate:operator", "DriveAdmin.RemoveDrive", "ConfigError"),
    ]
    assert calls[-1]["arguments"] == {"number": 7, "pool": ""}
    assert yaml.safe_load(run("audit", "show", log, "--last", "1", "--format", "yaml").stdout)["calls"] == calls[-1:]
    table = run("audit", "show", log, "--last", "2").stdout.splitlines()
    assert len(table) == 3
    assert {"number=7", "ConfigError", "certificate:operator"} < set(table[-1].split())


def test_a_support_bundle_is_made_with_the_same_access(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support_parts, "_doctor", lambda *_: [])  # it has tests of its own, and takes long
    output = tmp_path / "bundle.tar.gz"
    command = ("support", "dump", str(daemon.pool), "--output", str(output), "--format", "json")
    made = json.loads(run(*daemon.options(daemon.operator), *command).stdout)
    assert made["failed"] == []
    of_the_service = {"service/state.json", "service/stacks.txt", "service/process.txt", "pool/holders.json"}
    assert of_the_service <= set(made["files"])
    output.unlink()
    made = json.loads(run(*daemon.options(daemon.reader), *command).stdout)
    assert [failure["part"] for failure in made["failed"]] == ["service/stacks.txt"], "stacks are an operator's"


def test_what_is_no_audit_log(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"call": 1}\n')
    result = run("audit", "show", str(tmp_path / "a"))
    assert (result.exit_code, "line 1: is no record" in result.stderr) == (4, True)
    assert run("audit", "show", str(tmp_path / "none")).exit_code == 1
    of_folder = run("audit", "show", str(tmp_path))
    assert (of_folder.exit_code, f"{tmp_path} is a directory" in of_folder.stderr) == (1, True)
    assert "audit.path names" in of_folder.stderr
    (tmp_path / "audit.log").write_text("")
    assert f"Name the file: {tmp_path}/audit.log" in run("audit", "show", str(tmp_path)).stderr


def test_an_audit_log_is_shown_after_its_service_died_in_a_line(tmp_path: Path) -> None:
    """The log goes on behind that on a line of its own; what it tells must not be lost with the half one."""
    path, caller = tmp_path / "audit.log", Caller(LOCAL, "unix:", "DriveAdmin.Drives", RULES["DriveAdmin.Drives"])
    for _ in range(2):
        log = AuditLog(path)
        log.end(log.begin(caller, None), caller, "ok", 0.001)
        log.close()
        with path.open("a") as file:
            file.write('{"time": "2026-11-30T2')
    result = run("audit", "show", str(path), "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert [call["outcome"] for call in json.loads(result.stdout)["calls"]] == ["ok", "ok"]
    assert [line for line in result.stderr.splitlines() if "is no record" in line] == [
        f"note: {path}, line {number}: is no record of an audit log, and was passed over" for number in (3, 6)
    ]


def test_config_check_tells_of_certificates(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair = ca.issue("server", life=3 * (ca.certificate.not_valid_after_utc - ca.certificate.not_valid_before_utc) / 91)
    connector = tmp_path / "connector.json"
    config = {"service": "pool.example:7700", "service_tls": {"ca": str(ca.path)}}
    config["service_tls"] |= {"certificate": str(pair.certificate), "key": str(pair.key)}  # type: ignore[operator]
    connector.write_text(json.dumps(config))
    checked = run("config", "check", "--connector", str(connector))
    assert checked.exit_code == 0, checked.stderr
    assert f"note: {pair.certificate} is valid only until" in checked.stdout
    pair.key.chmod(0o644)
    checked = run("config", "check", "--connector", str(connector))
    assert checked.exit_code == 1
    assert f"service_tls.key = '{pair.key}': has the mode 0644" in checked.stderr
    assert f"chmod 600 {pair.key}" in checked.stderr
