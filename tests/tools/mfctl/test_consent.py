"""Commands that lose something for good: found by their mark, each refused without a terminal and without --yes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.tools.mfctl import consent
from meshfusion.tools.mfctl.command_tree import leaf_commands
from meshfusion.tools.mfctl.consent import agree, is_destructive
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.encryption.test_encrypted_pool import make, not_on_one_drive

DESTRUCTIVE = {name for name, command in leaf_commands(mfctl, "mfctl") if is_destructive(command)}

# Verbs that sound as if they lost something, and do not: why.
HARMLESS = {
    "mfctl service drain": "engines lose hits, nothing stored; the service must be named on the line",
    "mfctl context remove": "a name; what it held is said, and can be set again",
    "mfctl lab down": "a guest of the developer's own, with nothing in it that lasts",
    "mfctl path disable": "enable takes it back",
}
_VERBS = {
    *("remove", "replace", "drain", "erase-key", "erase", "delete", "destroy", "flash", "format", "wipe", "reset"),
    *("rollback", "down", "disable", "prune", "purge"),
}


def test_no_verb_that_sounds_like_loss_is_unmarked() -> None:
    for name, command in leaf_commands(mfctl, "mfctl"):
        if name.rpartition(" ")[2] in _VERBS:
            assert is_destructive(command) != (name in HARMLESS), f"{name}: mark it @destructive, or say why not"
    assert HARMLESS.keys() <= {name for name, _ in leaf_commands(mfctl, "mfctl")}


def test_all_of_them_can_be_agreed_to_beforehand() -> None:
    for name, command in leaf_commands(mfctl, "mfctl"):
        has_yes = any("--yes" in option.opts for option in command.params)
        assert has_yes == is_destructive(command), name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of two drives: of the only one nothing can be taken away."""
    path = tmp_path / "pool"
    create_pool_of_drives(path, size_bytes=6 << 20, segment_bytes=1 << 20, data_paths=(None, None))
    return path


Case = Callable[[Path, Path, pytest.MonkeyPatch], tuple[list[str], list[str]]]


def _drive(verb: str, *options: str) -> Case:
    def case(pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
        return ["jbof", verb, str(pool), "0", *options], ["drive 0 (", f"{pool}/data", str(pool), "compute it anew"]

    return case


def _key(pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    not_on_one_drive(monkeypatch)
    made = make(tmp_path / "encrypted")
    monkeypatch.setattr("meshfusion.jbof.drives.system.luks.CRYPTSETUP", made.luks)
    return ["pool", "erase-key", str(made.layout.directory)], [str(made.slices[0]), "lost for good"]


CASES: dict[str, Case] = {
    "mfctl jbof remove": _drive("remove"),
    "mfctl jbof drain": _drive("drain"),
    "mfctl jbof replace": _drive("replace", "--size", "6MiB"),
    "mfctl pool erase-key": _key,
}
# Asked of a card that is there: tests/tools/mfctl/test_dpu_flash.py and test_dpu_upgrade.py.
ELSEWHERE = {"mfctl dpu flash", "mfctl dpu rollback", "mfctl dpu upgrade"}


def test_every_marked_command_has_its_case() -> None:
    assert CASES.keys() | ELSEWHERE == DESTRUCTIVE


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("output_format", ["table", "json"])
def test_without_a_terminal_it_is_refused_and_names_the_loss(
    name: str, output_format: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "encrypted").mkdir()
    line, lost = CASES[name](path, tmp_path, monkeypatch)
    before = _all_files(tmp_path)
    result = CliRunner().invoke(mfctl, [*line, "--format", output_format], input="y\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    for words in (*lost, "--yes"):
        assert words in result.stderr.replace("\n", " ")
    assert _all_files(tmp_path) == before, "nothing half done"


@pytest.mark.parametrize("name", CASES)
def test_it_is_asked_at_a_terminal_and_not_done_without_a_yes(
    name: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "has_terminal", lambda: True)
    (tmp_path / "encrypted").mkdir()
    line, lost = CASES[name](path, tmp_path, monkeypatch)
    before = _all_files(tmp_path)
    result = CliRunner().invoke(mfctl, line, input="n\n")
    assert result.exit_code == 130
    assert result.stdout == "", "stdout is for the document alone"
    for words in (*lost, "nothing was done"):
        assert words in result.stderr
    assert _all_files(tmp_path) == before
    agreed = CliRunner().invoke(mfctl, line, input="y\n")
    assert agreed.exit_code == 0, agreed.output


def test_what_calls_a_drain_off_is_not_asked(path: Path) -> None:
    assert CliRunner().invoke(mfctl, ["jbof", "drain", str(path), "0", "--yes"]).exit_code == 0
    assert CliRunner().invoke(mfctl, ["jbof", "drain", str(path), "0", "--stop"]).exit_code == 0


def test_a_drive_that_is_not_there_is_refused_and_not_asked_about(path: Path) -> None:
    result = CliRunner().invoke(mfctl, ["jbof", "remove", str(path), "7"])
    assert result.exit_code == 1
    assert "has no drive 7" in result.output


def test_at_a_real_terminal(path: Path) -> None:
    """Typed into a pseudo-terminal; standard output is a pipe."""
    code = "from meshfusion.tools.mfctl.main import main; main()"
    for answer, exit_code in ((b"n\n", 130), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", code, "jbof", "drain", str(path), "0", "--format", "json"]
        os.write(ours, answer)
        done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60)
        os.close(theirs)
        os.close(ours)
        assert done.returncode == exit_code, done.stderr
        assert "drive 0 (" in done.stderr
        assert bool(done.stdout) is (exit_code == 0)


def test_a_yes_needs_no_terminal() -> None:
    agree("All is lost.", yes=True)
    with pytest.raises(click.UsageError, match=r"All is lost\. There is no terminal"):
        agree("All is lost.", yes=False)


def _all_files(folder: Path) -> dict[str, bytes]:
    def files() -> Iterator[Path]:
        yield from (each for each in sorted(folder.rglob("*")) if each.is_file())

    return {str(each): each.read_bytes() for each in files() if each.name != "lock.mdb"}
