"""Ctrl-C in the middle of what takes long: how far it was, how things are, 130, and that it can be done again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.pool import Pool, create_pool
from meshfusion.tools.mfctl import progress as progress_module
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.progress import InterruptedWork, Progress, told_when_interrupted
from tests.dpu.pool_cases import Holder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    create_pool(path, size_bytes=6 << 20, segment_bytes=1 << 20)
    with Pool.open(path) as pool, Holder(pool) as holder:
        for number in range(3):
            assert holder.put(number)
    return path


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The terminal's signal comes when some of it is done; also where these tests run without a terminal, and with it
    ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    update = progress_module.Progress.update

    def updated(self: Progress, done: int, total: int) -> None:
        update(self, done, total)
        if done:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(progress_module.Progress, "update", updated)
    yield
    signal.signal(signal.SIGINT, former)


def check_told(result: Result, *words: str) -> None:
    assert result.exit_code == 130, result.output
    assert result.stdout == ""
    for each in ("interrupted while ", *words, "next step: Run the same command again."):
        assert each in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("interrupted")
def test_a_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_told(run("pool", "check", str(path)), "checking chunks at 1 of 3; nothing was changed")
    as_json = run("pool", "check", str(path), "--format", "json")
    assert as_json.exit_code == 130
    error = json.loads(as_json.stderr.strip().splitlines()[-1])["error"]
    assert (error["kind"], error["exit_code"]) == ("Interrupted", 130)
    assert (error["message"][:11], error["next_step"]) == ("interrupted", "Run the same command again.")
    monkeypatch.undo()
    again = run("pool", "check", str(path))
    assert (again.exit_code, again.stdout.splitlines()[0][:16]) == (0, "checked 3 chunks")


@pytest.mark.usefixtures("interrupted")
def test_a_repair(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_told(run("pool", "repair", str(path)), "checking chunks at 1 of 3; what was repaired until then stays so")
    monkeypatch.undo()
    assert run("pool", "repair", str(path)).exit_code == 0, "nobody has the pool any more"
    assert run("pool", "check", str(path)).exit_code == 0


@pytest.mark.usefixtures("interrupted")
def test_an_index_that_is_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_told(run("pool", "rebuild-index", str(path)), "reading segments at ", "is as it was")
    assert "checked 3 chunks" in _checked(path, monkeypatch), "the old index is there and whole"
    assert run("pool", "rebuild-index", str(path)).exit_code == 0
    assert sorted(each.name for each in path.glob(".re*")) == []


def _checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.undo()
    result = run("pool", "check", str(path))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("interrupted")
def test_a_pool_that_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(6 << 20))
    line = ("pool", "create", str(tmp_path / "pool"), "--size", "6MiB", "--segment-size", "1MiB")
    check_told(run(*line, "--data-path", str(data)), "zeroing at ", "there is no pool")
    assert not (tmp_path / "pool").exists()
    monkeypatch.undo()
    assert run(*line, "--data-path", str(data)).exit_code == 0


@pytest.mark.usefixtures("interrupted")
def test_a_drive_that_is_added(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "new"
    data.write_bytes(bytes(6 << 20))
    line = ("jbof", "add", str(path), "--size", "6MiB", "--data-path", str(data))
    check_told(run(*line), "zeroing at ", "the pool is as it was")
    monkeypatch.undo()
    assert "checked 3 chunks" in run("pool", "check", str(path)).stdout
    assert run(*line).exit_code == 0


def test_what_goes_on_elsewhere_is_said_to() -> None:
    with (
        pytest.raises(InterruptedWork, match="interrupted; the service goes on"),
        told_when_interrupted("the service goes on", next_step="Look."),
    ):
        raise KeyboardInterrupt


def test_the_innermost_word_counts() -> None:
    with (
        pytest.raises(InterruptedWork, match="while zeroing; the inner one"),
        told_when_interrupted("the outer one", next_step=""),
        Progress("zeroing", left="the inner one"),
    ):
        raise KeyboardInterrupt


def test_an_error_is_no_interruption() -> None:
    with pytest.raises(ValueError, match="wrong"), Progress("zeroing", left="x"):
        raise ValueError("wrong")
