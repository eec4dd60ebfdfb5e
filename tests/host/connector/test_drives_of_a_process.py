"""The service as a process of its own that is killed while its drives change: it goes on from where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.pool import check_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.jbof.digest import DigestKernels
from tests.e2e.daemon import Daemon
from tests.host.support.engine_on_pool import CHUNK_TOKENS, prompt
from tests.host.support.kv_memory import layer_outermost
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import make_request
from tests.host.support.waiting import until
from tests.tools.mfctl.test_mfctl import run

SIZE_BYTES = 16 << 20
CHUNKS = 6
DRIVES = "drives: {check_interval_s: 0.1, probation_s: 0.3, drain_s: 2.0}\n"

pytestmark = pytest.mark.usefixtures("quick_reattach")


def blank(file: Path) -> Path:
    file.touch()
    os.truncate(file, SIZE_BYTES)
    return file


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, ...]:
    return tuple(blank(tmp_path / name) for name in ("zero", "one", "two"))


@pytest.fixture
def daemon(tmp_path: Path, files: tuple[Path, ...]) -> Iterator[Daemon]:
    pool = tmp_path / "pool"
    create_pool_of_drives(pool, size_bytes=SIZE_BYTES, segment_bytes=1 << 20, data_paths=files)
    daemon = Daemon(tmp_path, more=DRIVES)
    daemon.start()
    yield daemon
    daemon.kill()
    assert check_pool(pool, lambda done, total: None).damaged == ()


@pytest.fixture
def engine(daemon: Daemon, kernels: DigestKernels) -> Iterator[MiniEngine]:
    kv = layer_outermost(blocks=64)
    kv.fill(0)
    engine = MiniEngine(GrpcChunkService(daemon.address), kv, kernels)
    yield engine
    engine.close()


def ask(engine: MiniEngine, seed: int, turns: Iterator[int]) -> int:
    """How many tokens were loaded; the answer is right in any case."""
    request = engine.add(make_request(f"{seed}-{next(turns)}", prompt(CHUNKS * CHUNK_TOKENS + 7, seed)))
    engine.run(limit_s=30.0)
    assert engine.is_right(request)
    engine.finish_all()
    engine.run(limit_s=30.0)
    return request.loaded_tokens


def states(daemon: Daemon) -> dict[int, str]:
    result = run("jbof", "drives", str(daemon.pool), "--format", "json")
    assert result.exit_code == 0, result.output
    return {row["number"]: row["state"] for row in json.loads(result.stdout)["drives"]}


def test_a_service_that_is_killed_while_its_drives_change(
    daemon: Daemon, engine: MiniEngine, files: tuple[Path, ...], tmp_path: Path
) -> None:
    turns = count()

    def is_loaded_again() -> None:
        for seed in range(3):
            until(lambda seed=seed: ask(engine, seed, turns) == CHUNKS * CHUNK_TOKENS, limit_s=30.0)  # type: ignore[misc]

    is_loaded_again()
    files[1].rename(tmp_path / "elsewhere")
    until(lambda: states(daemon)[1] == "gone", limit_s=20.0, what="for the loss")
    ask(engine, 0, turns)
    daemon.kill()
    ask(engine, 0, turns)
    daemon.start()
    assert states(daemon) == {0: "online", 1: "gone", 2: "online"}
    is_loaded_again()
    (tmp_path / "elsewhere").rename(files[1])
    until(lambda: states(daemon)[1] == "online", limit_s=20.0, what="for the return")
    is_loaded_again()

    added = run("jbof", "add", str(daemon.pool), "--size", "16MiB", "--data-path", str(blank(tmp_path / "three")))
    assert added.output == "added drive 3 with 15 segments\n", added.output
    assert run("jbof", "drain", str(daemon.pool), "0", "--yes").exit_code == 0
    daemon.kill()  # while it is emptied
    daemon.start()
    until(lambda: states(daemon)[0] == "drained", limit_s=30.0, what="for its end")
    assert run("jbof", "remove", str(daemon.pool), "0", "--yes").exit_code == 0
    is_loaded_again()
    assert states(daemon) == {1: "online", 2: "online", 3: "online"}
    daemon.stop()
    assert [*states(daemon).values()] == ["here"] * 3
