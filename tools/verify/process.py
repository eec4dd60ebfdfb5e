"""A :mod:`meshfusion.tools.verify.engine` process, seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from meshfusion.tools.engine_process import EngineProcess, reporting_process
from meshfusion.tools.verify.answers import Answer
from meshfusion.tools.verify.engine import EngineTask
from meshfusion.tools.verify.prompts import ANSWER_TOKENS

ENGINE_MODULE: Final = "meshfusion.tools.verify.engine"


class VerifiedProcess:
    """``facts``: what it said when it was ready. Every call raises ServiceError when the process ends instead."""

    def __init__(self, process: subprocess.Popen[str], engine: EngineProcess) -> None:
        self._process = process
        self._engine = engine
        self.facts: dict[str, Any] = engine.event("ready")["value"]

    def call(self, op: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the engine's log says why: reported by the line below
        return self._engine.event(op)["value"]

    def answers(self, prompts: Sequence[Sequence[int]], *, is_cold: bool = False) -> list[Answer]:
        """To all of ``prompts`` at once."""
        asked = [list(prompt) for prompt in prompts]
        found = self.call("answer", prompts=asked, answer_tokens=ANSWER_TOKENS, is_cold=is_cold)
        return [Answer.from_json(body) for body in found]

    def answer(self, prompt: Sequence[int], *, is_cold: bool = False) -> Answer:
        (answer,) = self.answers([prompt], is_cold=is_cold)
        return answer


@contextmanager
def verified_process(
    task: EngineTask, log: Path, note: Callable[[str], None], *, module: str = ENGINE_MODULE
) -> Iterator[VerifiedProcess]:
    """It lives until the block ends, which then waits for its orderly end: a pool inside of it is closed.

    Raises ServiceError, with the cause from the engine's log, when it does not start.
    """
    command = [sys.executable, "-m", module]
    with reporting_process(command, lambda fd: replace(task, report_fd=fd).to_json(), log) as (process, report):
        engine = VerifiedProcess(process, EngineProcess(process, report, log, note))
        yield engine
        engine.call("stop")
