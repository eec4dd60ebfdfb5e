"""The engine as users run it: its core in a process of its own, in bfloat16."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool
from meshfusion.jbof.errors import PoolBusyError
from tests.e2e.conftest import Prompts
from tests.e2e.damage import damaged_chunks
from tests.e2e.harness import Answer, Engines, embedded, make_prompt

DEFAULT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def descendants(pid: int) -> set[int]:
    """All processes below ``pid``."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found, border = set(), {pid}
    while border:
        border = {child for child, parent in parents.items() if parent in border}
        found |= border
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_cold_then_warm_then_its_parent_is_killed(
    engines: Engines, model: Path, tmp_path: Path, prompts: Prompts
) -> None:
    path = tmp_path / "pool"
    cold = engines.start(model, embedded(path), environment=DEFAULT, dtype="bfloat16")
    answers: list[Answer] = [cold.answer(prompts.aligned), cold.answer(prompts.unaligned)]
    assert [answer.cached for answer in answers] == [0, 0]
    time.sleep(2)  # saves go on while the engine is idle
    cold.close()
    assert damaged_chunks(path) == 0

    warm = engines.start(model, embedded(path), environment=DEFAULT, dtype="bfloat16")
    again = [warm.answer(prompts.aligned), warm.answer(prompts.unaligned)]
    # Half the bytes a token, the same chunk bytes: chunks of twice the tokens.
    assert [answer.cached for answer in again] == [1024, 1000 // 256 * 256]
    for answer, former in zip(again, answers, strict=True):
        # bfloat16 differs a little with the shape of the batch: first tokens, and logprobs to 0.1.
        assert answer.tokens[0] == former.tokens[0]
        assert answer.distance(former) < 0.1

    # The engine library leaves its core running when the parent is killed; so does, then, what owns the pool.
    children = descendants(warm.process.pid)
    (core,) = [pid for pid in children if "EngineCore" in command_of(pid)]
    warm.send("generate", prompts=[make_prompt(60 + i, 1024) for i in range(4)], max_tokens=100)
    time.sleep(1)
    os.kill(warm.process.pid, signal.SIGKILL)
    with pytest.raises(PoolBusyError, match=f"in use by process {core}"):
        Pool.open(path)
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: not is_running(core))
    # The worker may outlive its core; the pool can be opened all the same, and forgets it once it is gone.
    with opened_once_free(path, core) as pool:
        for pid in children - {core}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in children))
        wait_until(lambda: not pool.status(deadline_s=5.0).holders)
        assert pool.status(deadline_s=5.0).committed_chunk_count >= 4 + 3
    assert damaged_chunks(path) == 0


def opened_once_free(path: Path, owner: int) -> Pool:
    """A killed process is a zombie before its last thread has closed what they share, the pool's lock too."""
    end_s = time.monotonic() + 30.0
    while time.monotonic() < end_s:
        try:
            return Pool.open(path)
        except PoolBusyError as error:
            if f"in use by process {owner}" not in error.message:
                raise
            time.sleep(0.05)
    return Pool.open(path)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.1)
