"""``mfctl service unit``: what it fills in, and what systemd says to it."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl import unit_command
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.unit_file import UnitFacts, unit_text
from tests.dpu.security.authority import Authority

NEEDS_SYSTEMD = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze (package systemd) is not installed"
)
TEMPLATE = Path(unit_command.__file__).parents[1] / "data/systemd/meshfusion.service"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


def config(tmp_path: Path, listen: str, pool: str, more: str = "") -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(f"listen: {listen}\npool: {{path: {pool}, create: true, size: 8MiB}}\n{more}")
    return path


def usual(tmp_path: Path, more: str = "") -> Path:
    return config(tmp_path, "unix:///run/meshfusion/meshfusion.sock", "/var/lib/meshfusion/pool", more)


def section(text: str, name: str = "Service") -> dict[str, list[str]]:
    """Values of each directive, which may stand several times."""
    found: dict[str, list[str]] = {}
    at = ""
    for line in text.splitlines():
        if line.startswith("["):
            at = line.strip("[]")
        elif line and not line.startswith("#") and at == name:
            directive, _, value = line.partition("=")
            found.setdefault(directive, []).append(value)
    return found


def facts(**changes: object) -> UnitFacts:
    fields: dict[str, object] = {
        "user": "kv",
        "serve": ("/opt/mf/bin/mfctl", "service", "run", "--config", "/etc/mf.yaml"),
        "reload": ("/opt/mf/bin/mfctl", "service", "reload", "--config", "/etc/mf.yaml"),
        "mounts": (Path("/var/lib/meshfusion/pool"),),
        "writes": (Path("/run/meshfusion"), Path("/var/lib/meshfusion")),
        "reads": (Path("/opt/mf"),),
        "stop_grace_s": 9.2,
        "devices": (),
        "exports_by_kernel": False,
    }
    return UnitFacts(**{**fields, **changes})  # type: ignore[arg-type]


def filled(**changes: object) -> dict[str, list[str]]:
    return section(unit_text(TEMPLATE.read_text(), facts(**changes)))


def test_a_pool_in_the_usual_places() -> None:
    unit = filled()
    assert unit["Type"] == ["notify"]
    assert unit["User"] == ["kv"]
    assert unit["ExecStart"] == ["/opt/mf/bin/mfctl service run --config /etc/mf.yaml"]
    assert (unit["RuntimeDirectory"], unit["StateDirectory"]) == (["meshfusion"], ["meshfusion"])
    assert "ReadWritePaths" not in unit
    assert unit["TimeoutStopSec"] == ["75s"], "stop_grace_s, and a minute for the rest"
    assert (unit["ProtectSystem"], unit["NoNewPrivileges"]) == (["strict"], ["yes"])
    assert (unit["ProtectHome"], unit["PrivateTmp"], unit["PrivateDevices"]) == (["yes"], ["yes"], ["yes"])
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["ProtectKernelTunables"] == ["yes"]


def test_other_places_are_opened_one_by_one() -> None:
    unit = filled(writes=(Path("/srv/kv"), Path("/run/a/b"), Path("/var/log/mf"), Path("/srv/kv")))
    assert unit["ReadWritePaths"] == ["/srv/kv"]
    assert (unit["RuntimeDirectory"], unit["LogsDirectory"]) == (["a"], ["mf"])


def test_homes_and_temporary_places_stay_visible_where_something_lies_there() -> None:
    assert filled(reads=(Path("/home/me/venv"),))["ProtectHome"] == ["read-only"]
    assert filled(writes=(Path("/root/pool"),))["ProtectHome"] == ["read-only"]
    assert filled(writes=(Path("/tmp/pool"),))["PrivateTmp"] == ["no"]


def test_drives_open_the_devices_and_no_more() -> None:
    unit = filled(devices=(Path("/dev/loop7"), Path("/dev/nvme0n1"), Path("/dev/loop7")))
    assert "PrivateDevices" not in unit
    assert unit["DevicePolicy"] == ["closed"]
    assert unit["DeviceAllow"] == ["/dev/loop7 rw", "/dev/nvme0n1 rw", "block-blkext rw", "char-nvme rw"]
    assert (unit["SupplementaryGroups"], unit["CapabilityBoundingSet"]) == (["disk"], [""])
    as_root = filled(devices=(Path("/dev/nvme0n1"),), user="root")
    assert "CAP_SYS_ADMIN" in as_root["CapabilityBoundingSet"][0]


def test_encrypted_drives_open_the_device_mapper() -> None:
    unit = filled(devices=(Path("/dev/vg0/red"),), user="root", is_encrypted=True, writes=(Path("/etc/mf/headers"),))
    assert {"/dev/mapper/control rw", "block-device-mapper rw"} <= set(unit["DeviceAllow"])
    assert unit["ReadWritePaths"] == ["/etc/mf/headers", "-/run/cryptsetup"]
    assert "CAP_IPC_LOCK" in unit["CapabilityBoundingSet"][0].split()


def test_the_kernels_target_needs_its_files() -> None:
    unit = filled(exports_by_kernel=True, user="root")
    assert unit["ProtectKernelTunables"] == ["no"]
    assert unit["CapabilityBoundingSet"][0].split().count("CAP_SYS_ADMIN") == 1


@pytest.mark.parametrize("path", ["/srv/a b", "/srv/100%", "/srv/$HOME", "/srv/a\nUser=root", '/srv/"'])
def test_a_path_that_systemd_would_read_otherwise_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot stand in a systemd unit"):
        unit_text(TEMPLATE.read_text(), facts(writes=(Path(path),)))


def test_the_command_fills_it_in(tmp_path: Path) -> None:
    path = usual(tmp_path, "stop_grace_s: 20\n")
    result = run("service", "unit", "--config", str(path))
    assert result.exit_code == 0, result.stderr
    unit = section(result.stdout)
    assert unit["User"] == [getpass.getuser()]
    assert unit["ExecStart"][0].endswith(f"service run --config {path}")
    assert unit["TimeoutStopSec"] == ["85s"]
    assert section(result.stdout, "Unit")["RequiresMountsFor"] == [f"/var/lib/meshfusion/pool {path}"]
    assert "@" not in result.stdout.replace("@system-service", "").split("\n", 3)[3]


def test_all_that_the_service_writes_to_is_opened(tmp_path: Path) -> None:
    more = (
        "telemetry: {listen: 'unix:///run/mf-telemetry/http.sock'}\n"
        "audit: {path: /srv/audit/audit.log}\nlog: {file: /var/log/meshfusion/meshfusion.log}\n"
    )
    unit = section(run("service", "unit", "--config", str(usual(tmp_path, more))).stdout)
    assert unit["RuntimeDirectory"] == ["meshfusion mf-telemetry"]
    assert (unit["LogsDirectory"], unit["ReadWritePaths"]) == (["meshfusion"], ["/srv/audit"])


def test_certificates_and_tokens_stay_visible(tmp_path: Path) -> None:
    """And systemd, which has neither, reloads by a signal."""
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    (tmp_path / "tokens").touch(mode=0o600)
    tls = f"tls: {{certificate: {pair.certificate}, key: {pair.key}, client_ca: {authority.path}}}\n"
    tokens = f"tokens_file: {tmp_path}/tokens\n"
    path = config(tmp_path, "127.0.0.1:7700", "/var/lib/meshfusion/pool", tls + tokens)
    found = unit_command._facts(path, getpass.getuser())
    assert {pair.certificate, pair.key, authority.path, tmp_path / "tokens"} <= set(found.reads)
    unit = section(run("service", "unit", "--config", str(path)).stdout)
    assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    by_token = run("service", "unit", "--config", str(usual(tmp_path, tokens))).stdout
    assert section(by_token)["ExecReload"] == unit["ExecReload"]
    assert "service reload --config" in run("service", "unit", "--config", str(usual(tmp_path))).stdout


def test_several_pools_and_the_audit_log_are_opened(tmp_path: Path) -> None:
    (tmp_path / "blue").mkdir()
    path = tmp_path / "service.yaml"
    path.write_text(
        "listen: unix:///run/meshfusion/meshfusion.sock\n"
        "audit: {path: /var/log/meshfusion/audit.log}\n"
        "pools:\n"
        "  r: {tenants: [red], pool: {path: /srv/red/pool, create: true, size: 8MiB}}\n"
        f"  b: {{tenants: [blue], pool: {{path: {tmp_path}/blue, create: true, size: 8MiB}}}}\n"
    )
    result = run("service", "unit", "--config", str(path))
    assert result.exit_code == 0, result.stderr
    assert section(result.stdout)["ReadWritePaths"] == [f"/srv/red {tmp_path}/blue"]
    assert section(result.stdout)["LogsDirectory"] == ["meshfusion"]
    mounts = section(result.stdout, "Unit")["RequiresMountsFor"]
    assert mounts == [f"/srv/red/pool {tmp_path}/blue {path}"]


@pytest.mark.parametrize("pools", ["", "pools: {}\n", "pool:\n"])
def test_a_configuration_without_a_pool_is_told(tmp_path: Path, pools: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(f"listen: unix:///run/meshfusion/meshfusion.sock\n{pools}")
    result = run("service", "unit", "--config", str(path))
    assert result.exit_code == 1
    assert "pool" in result.stderr
    assert "next step" in result.stderr


def test_programs_get_it_as_an_object(tmp_path: Path) -> None:
    command = ("service", "unit", "--config", str(usual(tmp_path)))
    told = json.loads(run(*command, "--format", "json").stdout)
    assert told == {"unit": run(*command).stdout, "output": None}


def test_it_is_installed_whole_and_never_over_another(tmp_path: Path) -> None:
    path, output = usual(tmp_path), tmp_path / "meshfusion.service"
    command = ("service", "unit", "--config", str(path), "--output", str(output))
    assert run(*command).exit_code == 0
    text = output.read_text()
    assert text == run("service", "unit", "--config", str(path)).stdout
    assert stat.S_IMODE(output.stat().st_mode) == 0o644
    assert run(*command).exit_code == 0, "the same again changes nothing"
    output.write_text("# mine\n")
    refused = run(*command)
    assert refused.exit_code == 1
    assert "exists and is another unit" in refused.stderr
    assert output.read_text() == "# mine\n"
    assert run(*command, "--force").exit_code == 0
    assert output.read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["meshfusion.service", "service.yaml"]


def test_a_user_that_is_not_there(tmp_path: Path) -> None:
    result = run("service", "unit", "--config", str(usual(tmp_path)), "--user", "nobody-of-that-name")
    assert result.exit_code == 1
    assert "there is no user nobody-of-that-name" in result.stderr
    assert "useradd --system" in result.stderr


def test_the_kernels_target_is_roots(tmp_path: Path) -> None:
    path = usual(tmp_path, "exports: {target: nvmet, portals: ['rdma://10.0.0.1:4420']}\n")
    assert "nobody may not set up the kernel's target" in run(
        "service", "unit", "--config", str(path), "--user", "nobody"
    ).stderr  # fmt: skip
    assert run("service", "unit", "--config", str(path), "--user", "root").exit_code == 0


def test_a_bad_configuration_is_told(tmp_path: Path) -> None:
    result = run("service", "unit", "--config", str(usual(tmp_path, "lgo: {}\n")))
    assert result.exit_code == 1
    assert "lgo: unknown key; did you mean log?" in result.stderr


@NEEDS_SYSTEMD
@pytest.mark.parametrize(
    "more",
    ["", "exports: {target: nvmet, portals: ['rdma://10.0.0.1:4420']}\n", "tokens_file: /etc/tokens\n"],
    ids=["files", "nvmet", "tokens"],
)
def test_systemd_has_nothing_to_say(tmp_path: Path, more: str) -> None:
    output = tmp_path / "meshfusion.service"
    assert run("service", "unit", "--config", str(usual(tmp_path, more)), "--output", str(output)).exit_code == 0
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(output)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in verified.stderr.splitlines() if "meshfusion.service" in line]
    assert (verified.returncode, complaints) == (0, [])


@NEEDS_SYSTEMD
def test_systemd_would_complain(tmp_path: Path) -> None:
    """The check above can fail."""
    output = tmp_path / "meshfusion.service"
    run("service", "unit", "--config", str(usual(tmp_path)), "--output", str(output))
    output.write_text(output.read_text().replace("ProtectClock=yes", "ProtectClocks=yes"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(output)], capture_output=True, text=True, timeout=60
    )
    assert "ProtectClocks" in verified.stderr
