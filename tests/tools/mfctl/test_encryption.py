"""``mfctl`` and encrypted pools. Files stand for devices; with the kernel's dm-crypt: tests/lab/test_encryption.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.encryption.file_luks import key_file
from tests.dpu.encryption.test_encrypted_pool import Made, make, not_on_one_drive


def run(*arguments: object, answer: str = "") -> Result:
    return CliRunner().invoke(mfctl, [str(argument) for argument in arguments], input=answer)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    not_on_one_drive(monkeypatch)
    made = make(tmp_path)
    monkeypatch.setattr("meshfusion.jbof.drives.system.luks.CRYPTSETUP", made.luks)
    return made


@pytest.mark.parametrize(
    "words", [("pool", "status"), ("pool", "check"), ("pool", "repair"), ("pool", "rebuild-index")]
)
def test_commands_open_it_and_close_it(made: Made, words: tuple[str, ...]) -> None:
    result = run(*words, made.layout.directory)
    assert result.exit_code == 0, result.output
    assert made.luks.open_names == []


def test_its_drives_are_shown_and_its_chunks(made: Made) -> None:
    (row,) = json.loads(run("jbof", "drives", made.layout.directory, "--format", "json").stdout)["drives"]
    assert row["state"] == "here"
    assert run("chunk", "list", made.layout.directory).exit_code == 0
    assert made.luks.open_names == []


def test_a_key_that_is_not_there_is_told(made: Made) -> None:
    made.place.key_file.unlink()
    result = run("pool", "check", made.layout.directory)
    assert result.exit_code == 1
    assert f"the key file {made.place.key_file} does not exist" in result.output


def test_another_key(made: Made, tmp_path: Path) -> None:
    new = key_file(tmp_path, "new")
    result = run("pool", "rekey", made.layout.directory, "--new-key-file", new)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"1 header is opened by {new} only")
    assert run("pool", "check", made.layout.directory).exit_code == 0


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.tools.mfctl.consent.has_terminal", lambda: True)


def test_erasing_asks(made: Made, terminal: None) -> None:
    result = run("pool", "erase-key", made.layout.directory, answer="n\n")
    assert result.exit_code != 0
    assert f"on {made.slices[0]} is lost for good" in result.output
    assert made.header().exists()


def test_erased(made: Made, terminal: None) -> None:
    result = run("pool", "erase-key", made.layout.directory, answer="y\n")
    assert result.exit_code == 0, result.output
    assert f"{made.slices[0]} is blank" in result.output
    assert f"shred -u {made.place.key_file}" in result.output
    again = run("pool", "check", made.layout.directory)
    assert again.exit_code == 4
    assert "was erased: nothing that it held can be read any more" in again.output


def test_erased_by_its_name_in_a_configuration(made: Made, tmp_path: Path) -> None:
    config = tmp_path / "service.yaml"
    pool = f"pool: {{path: {made.layout.directory}, encryption: {{header_dir: /h, key_file: /k}}}}"
    config.write_text(f"listen: unix:///s\naudit: {{path: /a}}\npools: {{red: {{tenants: [red], {pool}}}}}\n")
    unknown = run("pool", "erase-key", "--config", config, "--pool", "blue", "--yes")
    assert unknown.exit_code == 1
    assert "has no pool 'blue': red" in unknown.output
    result = run("pool", "erase-key", "--config", config, "--pool", "red", "--yes", "--format", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["blank"] == [str(made.slices[0])]


@pytest.mark.parametrize("words", [(), ("--pool", "red"), ("p", "--config", "x")])
def test_which_pool_has_to_be_said(words: tuple[str, ...]) -> None:
    assert run("pool", "erase-key", *words, "--yes").exit_code == 2


def test_a_program_has_to_say_yes(made: Made) -> None:
    assert run("pool", "erase-key", made.layout.directory, "--format", "json").exit_code == 2
    assert made.header().exists()


def test_options_of_create_belong_together(tmp_path: Path) -> None:
    result = run("pool", "create", tmp_path / "p", "--size", "300MiB", "--key-file", tmp_path / "k")
    assert result.exit_code == 2
    assert "belong together" in result.output
