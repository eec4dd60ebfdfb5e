"""What the quickstart is given: refused at once, in one message with one way out, on standard error."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools import quickstart
from meshfusion.tools.quickstart import cli, read_prompt
from meshfusion.tools.quickstart_inputs import check_pool_size
from meshfusion.tools.quickstart_model import DEFAULT_MODEL_DIR, prepare_model

PROJECT_DIR = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test may touch the project's own pool, nor start an engine."""
    monkeypatch.setattr(quickstart, "CACHE", tmp_path / "cache")

    def start(*_: object) -> None:
        raise AssertionError("the inputs were accepted")

    monkeypatch.setattr(quickstart, "_run_phases", start)
    return tmp_path / "cache"


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--context", "255", "--context 255 is too short"),
        ("--document", "missing", "--document missing does not exist"),
        ("--document", "/", "--document / is not a file"),
        ("--document", "[red]x[/blue]", "--document [red]x[/blue] does not exist"),
        ("--model", "/", "it has no config.json"),
        ("--pool-size", "abc", "--pool-size: 'abc' is not a size"),
        ("--pool-size", "256MiB", "--pool-size 256MiB: "),
    ],
)
def test_unusable_value_is_refused_with_one_next_step(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli([option, value]) == 1
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.count("next step:") == 1
    assert printed.out == ""


def test_long_message_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "word " * 40
    assert cli(["--document", str(tmp_path / name)]) == 1
    assert f"{tmp_path / name} does not exist\n" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["255", "many"])
def test_errors_are_one_json_object_when_asked(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["--context", value, "--format", "json"]) != 0
    error = json.loads(capsys.readouterr().err)["error"]
    assert value in error["message"]
    assert error["next_step"]


def test_usage_names_the_command_people_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("Usage: tools/quickstart ")
    assert "A first run takes about 5 to 10 minutes" in told


def test_binary_document_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = write(tmp_path / "document", b"text\xff\xfe")
    assert cli(["--document", str(document)]) == 1
    assert "is not UTF-8 text (byte 4)" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["{", "[]", b"\xff"])
def test_unreadable_model_config_is_told(
    tmp_path: Path, config: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "model" / "config.json", config).parent
    assert cli(["--model", str(folder)]) == 1
    assert "its config.json is not" in capsys.readouterr().err


def test_model_that_transformers_does_not_know_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "model" / "config.json", '{"model_type": "nonsense"}').parent
    with pytest.raises(ConfigError, match="is not a usable model folder") as refused:
        read_prompt(folder, quickstart.DOCUMENT, 256)
    assert "nonsense" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 2


def test_smallest_pool_is_the_one_that_can_be_made(tmp_path: Path) -> None:
    """Four segments of 64 MiB and one MiB before them (the label's place)."""
    check_pool_size("257MiB")
    with pytest.raises(ConfigError, match="257MiB"):
        check_pool_size(str((257 << 20) - 1))


@pytest.mark.parametrize(("words", "advice"), [(100, "use a longer --document"), (400, r"use --context \d{3} or")])
def test_advice_for_a_short_document_can_be_followed(tmp_path: Path, words: int, advice: str) -> None:
    model = prepare_model(PROJECT_DIR / DEFAULT_MODEL_DIR, lambda _: None)
    document = write(tmp_path / "document", "hello " * words)
    with pytest.raises(ConfigError) as refused:
        read_prompt(model, document, 4096)
    assert refused.match(advice)
    if words == 400:
        context = int(refused.value.next_step.split()[2])
        assert len(read_prompt(model, document, context)) == context + 1


def test_second_quickstart_in_one_folder_is_refused(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = write(own_cache / "quickstart.lock", "")
    with lock.open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert cli([]) == 3  # as mfctl's "pool busy"
        assert "another tools/quickstart is running" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="accepted"):
        cli([])
