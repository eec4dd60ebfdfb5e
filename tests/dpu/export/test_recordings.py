"""The fake answers as a real nvmf_tgt did, and so does one of today where it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dpu.export.conftest import Spdk
from tests.dpu.export.conversation import CALLS, hold

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("spdk-*.json"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: str(path.stem))
def test_answers_are_as_recorded(path: Path, spdk: Spdk, tmp_path: Path) -> None:
    recorded = json.loads(path.read_text())
    spdk.rpc.connect(60.0)
    answers = hold(spdk.rpc, tmp_path)
    assert [answer["method"] for answer in recorded["answers"]] == [method for method, _ in CALLS]
    for (method, parameters), expected, answer in zip(CALLS, recorded["answers"], answers, strict=True):
        assert _comparable(answer) == _comparable(expected), (method, parameters)


def test_there_are_recordings_and_they_name_the_commit() -> None:
    assert RECORDINGS
    for path in RECORDINGS:
        assert json.loads(path.read_text())["spdk"].split()[-1] in path.stem


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what has no meaning to us: the order of hosts, and of what is made."""
    copy: dict[str, Any] = json.loads(json.dumps(answer))
    if copy["method"] == "nvmf_get_subsystems":
        for subsystem in copy.get("result", ()):
            subsystem["hosts"].sort(key=lambda host: host["nqn"])
    if copy["method"] == "framework_get_config":
        copy["result"].sort(key=lambda entry: json.dumps(entry, sort_keys=True))
    return copy
