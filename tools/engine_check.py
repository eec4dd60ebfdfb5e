"""Does the engine that is installed here take a ``--kv-transfer-config``? Tried in a child process, without a model.

An engine's libraries take seconds to import, may hang on a device's driver and print what they like: nothing of that
is to befall the command that asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.findings import Finding, State

CHILD: Final = (sys.executable, "-m", "meshfusion.tools.engine_check_child")


def check_engine(
    transfer: Mapping[str, Any], *, deadline_s: float, child: Sequence[str] = CHILD
) -> tuple[Finding, ...]:
    """``transfer``: the kv_transfer_config. What was tried, up to the first that failed.

    Raises :class:`~meshfusion.jbof.errors.MeshFusionError` when the child does not answer by the deadline, or dies.
    """
    with tempfile.TemporaryDirectory(prefix="mfctl-engine-") as scratch:
        answer = Path(scratch) / "answer.json"
        command = [*child, json.dumps(transfer), str(answer)]
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=deadline_s,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise MeshFusionError(
                f"the installed engine could not be asked within {deadline_s:g} s",
                next_step="Give more time (--deadline), or see whether `python -c 'import vllm'` ends.",
            ) from error
        if not answer.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise MeshFusionError(
                f"the process that asked the installed engine ended with {done.returncode}: {last}",
                next_step="See whether `python -c 'import vllm'` works with this Python.",
            )
        found = json.loads(answer.read_text(encoding="utf-8"))
    return tuple(Finding(check, State(state), cause, remedy) for check, state, cause, remedy in found)
