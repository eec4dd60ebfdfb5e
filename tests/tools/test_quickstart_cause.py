"""The cause of an engine's failure, found in logs as vLLM writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.tools.engine_process import _cause

PREFIX = "(EngineCore pid=7) ERROR 11-29 20:59:36 [core.py:1005] "
ECHO = """Traceback (most recent call last):
  File "/v/utils.py", line 9, in wait
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def traceback(last: str, prefix: str = PREFIX) -> str:
    lines = ["Traceback (most recent call last):", '  File "/v/model.py", line 12, in load', "    assert x", last]
    return "".join(f"{prefix}{line}\n" for line in lines)


@pytest.mark.parametrize("prefix", [PREFIX, "(Worker TP0 pid=8) ", ""])
def test_exception_is_told_not_its_echo(tmp_path: Path, prefix: str) -> None:
    log = tmp_path / "log"
    log.write_text("INFO start\n" + traceback("AssertionError: head size 7", prefix) + ECHO)
    assert _cause(log) == ("AssertionError: head size 7", "")


def test_exception_without_a_message_gets_its_place(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(traceback("AssertionError") + ECHO)
    assert _cause(log) == ("AssertionError at /v/model.py:12", "")


def test_own_error_comes_first_and_its_next_step_apart(tmp_path: Path) -> None:
    ours = f"meshfusion.jbof.errors.UnsupportedError: two lines\n{PREFIX}  - second\n{PREFIX}  next step: do this"
    log = tmp_path / "log"
    log.write_text(traceback("ValueError: before") + traceback(ours) + ECHO)
    assert _cause(log) == ("two lines\n  - second", "do this")


@pytest.mark.parametrize(
    ("text", "cause"), [("", "it said nothing"), ("a\nb\n", "b"), (ECHO, ECHO.splitlines()[-1]), ("Killed\n", "Killed")]
)
def test_something_is_told_of_any_log(tmp_path: Path, text: str, cause: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert _cause(log) == (cause, "")


def test_a_traceback_that_was_dealt_with_is_not_the_cause(tmp_path: Path) -> None:
    """As vLLM 0.32 logs it with skip_tokenizer_init."""
    mark = "(MainProcess pid=25357) WARNING 11-30 15:06:41 [base.py:380] "
    log = tmp_path / "log"
    log.write_text(
        f"{mark}Traceback (most recent call last):\n{mark}    raise ValueError('Tokenizer')\n"
        f"{mark}ValueError: Tokenizer not available when `skip_tokenizer_init=True`\n"
        'Traceback (most recent call last):\n  File "/e.py", line 198, in _pages\n    held = layers[name]\n'
        "KeyError: 'model.layers.0.self_attn.attn'\n"
    )
    assert "KeyError" in _cause(log)[0]
