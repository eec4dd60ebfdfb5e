"""The log in a file: its mode, what happens when it is moved away, and when it cannot be written."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfusion.dpu.config import LogConfig
from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl import daemon
from meshfusion.tools.mfctl.log_file import LogFile
from meshfusion.tools.mfctl.main import mfctl
from tests.host.support.waiting import until
from tests.tools.mfctl.service_process import ServiceProcess, small_config

EXAMPLE = Path(daemon.__file__).parents[1] / "data/logrotate/meshfusion"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "service.log"


@pytest.fixture
def log(path: Path) -> logging.Logger:
    path.parent.mkdir()
    logger = logging.Logger("test")
    logger.addHandler(LogFile(path))
    return logger


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_its_group_may_read_it_whatever_the_mask(path: Path, mask: int) -> None:
    path.parent.mkdir()
    before = os.umask(mask)
    try:
        LogFile(path).close()
    finally:
        os.umask(before)
    assert mode(path) == 0o640


def test_one_that_is_there_keeps_its_mode_and_its_lines(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("former\n")
    path.chmod(0o600)
    logger = logging.Logger("test")
    logger.addHandler(LogFile(path))
    logger.warning("latter")
    assert (mode(path), path.read_text()) == (0o600, "former\nlatter\n")


def test_a_file_that_was_moved_away_is_followed_by_a_new_one(log: logging.Logger, path: Path) -> None:
    log.warning("one")
    moved = path.rename(path.with_name("service.log.1"))
    log.warning("two")
    assert (moved.read_text(), path.read_text(), mode(path)) == ("one\n", "two\n", 0o640)
    path.unlink()
    log.warning("three")
    assert path.read_text() == "three\n"


def test_what_cannot_be_written_there_goes_to_stderr_and_no_call_fails(
    log: logging.Logger, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.warning("one")
    shutil.rmtree(path.parent)
    log.warning("two")
    log.warning("three")
    told = capsys.readouterr().err
    assert re.search(r"^two \(not in .*service\.log: .*No such file", told, re.MULTILINE)
    assert "three" in told
    path.parent.mkdir()
    log.warning("four")
    assert path.read_text() == "four\n"


def test_a_full_disk_is_no_error_of_who_logs(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("test")
    logger.addHandler(LogFile(Path("/dev/full")))
    logger.warning("one")
    assert "one (not in /dev/full: [Errno 28] No space left on device)" in capsys.readouterr().err


def test_text_that_is_none_is_written_all_the_same(log: logging.Logger, path: Path) -> None:
    log.warning("bad: \udcff")
    assert path.read_text() == "bad: \\udcff\n"


@pytest.mark.parametrize("kind", ["missing directory", "directory", "pipe"])
def test_a_file_that_cannot_be_one_is_an_error_with_a_way_out(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "x"
    if kind == "directory":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place = tmp_path / "nowhere" / "x"
    with pytest.raises(ConfigError, match=rf"log\.file = {place}: cannot be written") as error:
        LogFile(place)
    assert "Make its directory" in error.value.next_step


def test_a_log_that_cannot_be_opened_leaves_the_former(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    with pytest.raises(ConfigError):
        daemon.configure_logging(LogConfig(level="debug", file=tmp_path / "nowhere" / "x"))
    assert (root.level, root.handlers) == before


# ---- of a service ----------------------------------------------------------------------------------------------------


def test_a_service_logs_there_and_goes_on_after_a_rotation(tmp_path: Path, path: Path) -> None:
    path.parent.mkdir()
    with ServiceProcess(small_config(tmp_path, f"log: {{file: {path}, format: json}}\n")) as service:
        assert service.log == "", "nothing on stderr"
        assert "created pool" in path.read_text()
        path.rename(path.with_name("old"))
        service.process.send_signal(signal.SIGHUP)
        until(lambda: path.exists() and "reloaded: nothing has changed" in path.read_text())
        assert mode(path) == 0o640
        service.process.send_signal(signal.SIGTERM)
        assert service.end() == 0
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "stopped"


def test_a_reload_takes_the_log_to_another_file_or_nowhere(tmp_path: Path, path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        small_config(tmp_path, f"log: {{file: {path}, level: debug}}\n")
        refused = CliRunner().invoke(mfctl, ["service", "reload", "--service", service.address])
        assert refused.exit_code == 1
        assert re.search(rf"log\.file = .*: the directory {path.parent} does not exist", refused.stderr)
        path.parent.mkdir()
        reloaded = CliRunner().invoke(mfctl, ["service", "reload", "--service", service.address])
        assert f"applied: log.file is {path} (was not set)" in reloaded.stdout
        assert "reloaded: log.level is debug" in path.read_text()
        assert "reloaded: log.level" not in service.log


def test_a_configuration_with_an_impossible_log_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, f"log: {{file: {tmp_path}/nowhere/x}}\n")
    checked = CliRunner().invoke(mfctl, ["config", "check", str(config)])
    assert checked.exit_code == 1
    assert re.search(rf"log\.file = .*: the directory {tmp_path}/nowhere does not exist", checked.stderr)
    config = small_config(tmp_path, f"log: {{file: {tmp_path}}}\n")
    assert "is a directory; name a file in it" in CliRunner().invoke(mfctl, ["config", "check", str(config)]).stderr


@pytest.mark.skipif(shutil.which("logrotate") is None, reason="logrotate is not installed")
def test_the_example_is_one_that_logrotate_takes(tmp_path: Path) -> None:
    text = (
        EXAMPLE.read_text().replace("/var/log/meshfusion", str(tmp_path)).replace("meshfusion meshfusion", "root root")
    )
    (tmp_path / "conf").write_text(text)
    (tmp_path / "conf").chmod(0o644)
    command = ["logrotate", "--debug", "--state", str(tmp_path / "state"), str(tmp_path / "conf")]
    rotated = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (rotated.returncode, "error" in rotated.stderr) == (0, False), rotated.stderr
