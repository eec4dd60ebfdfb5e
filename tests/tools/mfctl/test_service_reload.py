"""Reloading: all of it or nothing, by a command and by SIGHUP, with a service in a process of its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.config import LogConfig, ServiceConfig, load_service_config
from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.reloader import Reloader
from tests.dpu.pool_cases import make_pool
from tests.host.support.waiting import until
from tests.tools.mfctl.service_process import ServiceProcess, small_config


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


def test_it_is_told_what_changed_and_what_waits(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        command = ("service", "reload", "--config", str(service.config))
        assert run(*command).stdout == "nothing has changed\n"
        small_config(tmp_path, "medium: {free_fraction: 0.25}\nlog: {level: debug, format: json}\n")
        service.config.write_text(service.config.read_text().replace(f"{tmp_path}/s", f"{tmp_path}/other"))
        result = run(*command)
        assert result.exit_code == 0, result.stderr
        assert "applied: medium.free_fraction is 0.25 (was 0.05)\n" in result.stdout
        assert "applied: log.level is debug (was info)\n" in result.stdout
        waits = f"needs a restart: listen is unix://{tmp_path}/s, and unix://{tmp_path}/other in the file\n"
        assert waits in result.stdout
        assert '"message": "reloaded: medium.free_fraction is 0.25 (was 0.05)"' in service.log, "as JSON from now on"

        again = json.loads(run(*command, "--format", "json").stdout)
        assert again["applied"] == []
        assert [change["key"] for change in again["needs_restart"]] == ["listen"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("medium: {free_fraction: 7}\nlog: {level: debug}\n", "medium.free_fraction = 7"),
        ("stop_grace: 3\nlog: {level: debug}\n", "stop_grace: unknown key; did you mean stop_grace_s?"),
        ("medium: {drive_writes_per_day: 0.001}\nlog: {level: debug}\n", "none could ever be opened"),
        ("log: {level: debug\n", "service.yaml"),
    ],
)
def test_anything_wrong_changes_nothing(tmp_path: Path, more: str, told: str) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        small_config(tmp_path, more)
        result = run("service", "reload", "--service", service.address)
        assert result.exit_code == 1
        assert told in result.stderr
        assert "the configuration is not reloaded, and nothing has changed" in service.log
        small_config(tmp_path, "log: {level: warning}\n")
        assert run("service", "reload", "--service", service.address).stdout == (
            "applied: log.level is warning (was info)\n"
        )


def test_sighup_reloads_and_a_bad_file_ends_nothing(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        small_config(tmp_path, "stop_grace_s: nonsense\n")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: "nothing has changed: " in service.log)
        small_config(tmp_path, "stop_grace_s: 0.125\n")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: "reloaded: stop_grace_s is 0.125 (was 10)" in service.log)
        service.process.send_signal(signal.SIGTERM)
        assert service.end() == 0


# ---- in process --------------------------------------------------------------------------------------------------


def test_a_log_that_cannot_be_opened_takes_the_rest_back(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    path = small_config(tmp_path)
    running = load_service_config(path)
    tuned: list[ServiceConfig] = []

    def relog(config: LogConfig) -> None:
        raise ConfigError("log.file: no space", next_step="make some")

    reloader = Reloader(path, running, retune=tuned.append, relog=relog)
    small_config(tmp_path, "medium: {free_fraction: 0.25}\nlog: {level: debug}\n")
    with pytest.raises(ConfigError, match="no space"):
        reloader.reload()
    assert [config.medium.free_fraction for config in tuned] == [0.25, 0.05]
    assert reloader.running == running


def test_a_pool_that_refuses_leaves_the_log_alone(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    path = small_config(tmp_path)
    running: ServiceConfig = load_service_config(path)

    asked: list[ServiceConfig] = []

    def retune(config: ServiceConfig) -> None:
        asked.append(config)
        if config != running:
            raise ConfigError("medium.drive_writes_per_day: too little", next_step="more")

    def relog(config: LogConfig) -> None:
        raise AssertionError("not asked for")

    reloader = Reloader(path, running, retune=retune, relog=relog)
    small_config(tmp_path, "log: {level: debug}\n")
    with pytest.raises(ConfigError, match="too little"):
        reloader.reload()
    assert reloader.running == running
    assert asked[-1] == running, "of several pools, those before it had been tuned"
