"""An engine without its cache: what it leaves in the run directory, what `mfctl doctor` shows."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.connector.off_board import show_off, unshow_off
from meshfusion.host.connector.off_note import OffNote, WhyOff, decode_note, encode_note, note_name
from meshfusion.host.path.flexpath.run_dir import ENVIRONMENT
from meshfusion.jbof.errors import FormatError, UnsupportedError
from meshfusion.tools.mfctl.engines_off import check_engines
from meshfusion.tools.mfctl.findings import State
from meshfusion.tools.mfctl.main import mfctl

ERROR = UnsupportedError("the model is odd, for 2 reason(s):\n  - one\n  - two", next_step="use another one")
NOTES = st.builds(
    OffNote,
    pid=st.integers(1, 1 << 22),
    written_s=st.floats(0, 1e11),
    why=st.sampled_from(WhyOff),
    reason=st.text(),
    next_step=st.text(),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "run"))
    return tmp_path / "run"


@given(NOTES)
def test_a_note_comes_back(note: OffNote) -> None:
    assert decode_note(encode_note(note), "there") == note


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"pid": 1}',
        b'{"pid": 1, "written_s": 1.0, "why": "mood", "reason": "", "next_step": ""}',
        b'{"pid": "1", "written_s": 1.0, "why": "path", "reason": "", "next_step": ""}',
        b'{"pid": 1, "written_s": 1.0, "why": "path", "reason": 7, "next_step": ""}',
    ],
)
def test_what_is_no_note_says_where(raw: bytes) -> None:
    with pytest.raises(FormatError, match="there does not tell"):
        decode_note(raw, "there")


def test_an_engine_is_shown_until_it_ends(folder: Path) -> None:
    (before,) = check_engines()
    assert before.state is State.INFO
    show_off(WhyOff.ENGINE, ERROR)
    (finding,) = check_engines()
    assert (finding.check, finding.state) == (f"engine {os.getpid()}", State.WARN)
    assert finding.cause == "runs without its cache (engine): the model is odd, for 2 reason(s):\n  - one\n  - two"
    assert finding.remedy == "use another one; then start it again."
    unshow_off()
    assert [found.state for found in check_engines()] == [State.INFO]
    assert list(folder.iterdir()) == []


def test_the_doctor_shows_it_and_does_not_fail_for_it(folder: Path) -> None:
    show_off(WhyOff.PATH, ERROR)
    result = CliRunner().invoke(mfctl, ["doctor", "--format", "json"])
    shown = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    assert shown[f"engine {os.getpid()}"]["state"] == "warn"
    assert "(path)" in shown[f"engine {os.getpid()}"]["cause"]
    lines = [line.split() for line in CliRunner().invoke(mfctl, ["doctor"]).stdout.splitlines()]
    for reason in (["-", "one"], ["-", "two"]):
        assert reason in lines, "each on a line of its own"


def test_what_a_dead_engine_left_is_passed_over(folder: Path) -> None:
    show_off(WhyOff.ENGINE, ERROR)
    (finding,) = check_engines(is_gone=lambda pid, written_s: True)
    assert finding.state is State.INFO


def test_broken_notes_and_other_files(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / note_name(1)).write_bytes(b"{")
    (folder / "off-x.json").write_bytes(b"{")
    (folder / "paths-1.json").write_bytes(b"{")
    (finding,) = check_engines()
    assert finding.state is State.WARN
    assert note_name(1) in finding.cause


def test_a_folder_that_others_can_write_to_is_not_believed(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    note = OffNote(os.getpid(), time.time(), WhyOff.ENGINE, "believe me", "send money")
    (folder / note_name(note.pid)).write_bytes(encode_note(note))
    (finding,) = check_engines()
    assert finding.state is State.WARN
    assert "believe me" not in finding.cause
    assert "can be written to by others" in finding.cause


def test_trouble_with_the_folder_costs_the_note_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file")
    show_off(WhyOff.MEMORY, ERROR)
    assert "does not see" in caplog.text
    unshow_off()
    assert folder.read_text() == "a file"
