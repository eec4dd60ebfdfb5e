"""Engines on a real service over its socket, while drives of its pool are lost, come back, are added and emptied.

Every answer is judged byte by byte: a drive may cost hits and nothing else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.drive_client import GrpcDriveAdmin
from meshfusion.dpu.api.drive_types import AddDriveRequest, DrainDriveRequest, RemoveDriveRequest
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.drive_options import DriveOptions
from meshfusion.dpu.pool import Pool, PoolOptions, check_pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.host.support.engine_on_pool import CHUNK_TOKENS, EngineFactory, prompt, settle
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import Request, make_request
from tests.host.support.waiting import until

SIZE_BYTES = 16 << 20
CHUNKS = 6
DEADLINE_S = 20.0
FAST = DriveOptions(check_interval_s=0.05, probation_s=0.2, drain_s=0.3, window_s=0.5, look_deadline_s=1.0)

pytestmark = pytest.mark.usefixtures("quick_reattach")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, ...]:
    found = tuple(tmp_path / name for name in ("zero", "one", "two"))
    for file in found:
        blank(file)
    return found


@pytest.fixture
def path(tmp_path: Path, files: tuple[Path, ...]) -> Iterator[Path]:
    path = tmp_path / "pool"
    create_pool_of_drives(path, size_bytes=SIZE_BYTES, segment_bytes=1 << 20, data_paths=files)
    yield path
    assert check_pool(path, lambda done, total: None).damaged == ()


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    with Pool.open(path, PoolOptions(heartbeat_s=0.1), drive_options=FAST) as opened:
        yield opened


@pytest.fixture
def address(pool: Pool, tmp_path: Path) -> Iterator[str]:
    server = serve(pool, f"unix://{tmp_path}/s", admin=pool.drive_admin)
    yield server.address
    server.stop(1.0)


@pytest.fixture
def admin(address: str) -> Iterator[GrpcDriveAdmin]:
    client = GrpcDriveAdmin(address)
    yield client
    client.close()


@pytest.fixture
def engine(address: str, start: EngineFactory) -> MiniEngine:
    return start(service=GrpcChunkService(address))


def blank(file: Path) -> Path:
    file.touch()
    os.truncate(file, SIZE_BYTES)
    return file


def ask(engine: MiniEngine, seed: int, turn: str) -> Request:
    """A prompt of some chunks, answered right whatever of it was loaded, and saved as far as that is possible."""
    tokens = prompt(CHUNKS * CHUNK_TOKENS + 7, seed)
    request = engine.add(make_request(f"{seed}-{turn}", tokens))
    engine.run(limit_s=30.0)
    assert engine.is_right(request), f"prompt {seed}, {turn}"
    engine.finish_all()
    engine.run(limit_s=30.0)
    return request


def ask_until_loaded(engine: MiniEngine, seed: int, turn: str) -> None:
    """It may take some turns: after saves that failed an engine waits before it saves again."""
    turns = count()
    until(lambda: ask(engine, seed, f"{turn} {next(turns)}").loaded_tokens == CHUNKS * CHUNK_TOKENS, what="for hits")


def drives_of(pool: Pool) -> set[int]:
    chunks = pool.list_chunks(api.ListRequest(limit=1000), deadline_s=1).chunks
    return {drive_of_segment(shard.extent.segment) for chunk in chunks for shard in chunk.shards}


def state(admin: GrpcDriveAdmin, number: int) -> str:
    return next(drive.state for drive in admin.drives(deadline_s=DEADLINE_S) if drive.number == number)


def is_told(engine: MiniEngine, pool: Pool) -> None:
    """The engine knows all drives, and has opened them; the service writes to all that may be written."""

    def told() -> bool:
        engine.step()
        attachment, slot = engine.client.attachment, engine.worker.parts.slot
        has_told = attachment is not None and attachment.drives_version == pool._drives.reach.version
        return has_told and slot.attachment == attachment and not slot.opening_holder_id

    until(told, what="for the engine to follow")
    until(lambda: not pool._drives.lives.waits_for_engines, what="for the service to know that")


def test_a_drive_is_lost_and_comes_back(
    engine: MiniEngine, pool: Pool, admin: GrpcDriveAdmin, files: tuple[Path, ...], tmp_path: Path
) -> None:
    for seed in range(3):
        ask(engine, seed, "first")
    assert 1 in drives_of(pool)
    files[1].rename(tmp_path / "elsewhere")
    for seed in range(3):  # some of it while the service has not seen it yet
        ask(engine, seed, "without")
    until(lambda: state(admin, 1) == "gone", what="for the loss")
    for seed in range(4):
        ask(engine, seed, "gone")
    (tmp_path / "elsewhere").rename(files[1])
    ask(engine, 0, "back")
    until(lambda: state(admin, 1) == "online", what="for the return")
    is_told(engine, pool)
    for seed in range(4):
        ask_until_loaded(engine, seed, "after")
    settle(engine, pool)


def test_a_copy_takes_the_drives_place(
    engine: MiniEngine, pool: Pool, admin: GrpcDriveAdmin, files: tuple[Path, ...], tmp_path: Path
) -> None:
    """What the engine has open is then no drive of the pool, and what it writes there is never found."""
    for seed in range(3):
        ask(engine, seed, "first")
    shutil.copy(files[1], tmp_path / "copy")
    (tmp_path / "copy").rename(files[1])
    for seed in range(6):
        ask(engine, seed, "exchanged")
    until(lambda: dict(pool.status(deadline_s=1).counters).get("drive_alarms", 0) > 1, what="for the exchange")
    until(lambda: state(admin, 1) == "online", what="for the copy")
    is_told(engine, pool)
    for seed in range(6):
        ask_until_loaded(engine, seed, "after")
    settle(engine, pool)


@pytest.mark.parametrize("size_bytes", [0, SIZE_BYTES // 2])
def test_a_drive_is_cut_short_under_the_engine(
    engine: MiniEngine, pool: Pool, admin: GrpcDriveAdmin, files: tuple[Path, ...], size_bytes: int
) -> None:
    for seed in range(3):
        ask(engine, seed, "first")
    os.truncate(files[1], size_bytes)
    for seed in range(3):
        ask(engine, seed, "cut")
    until(lambda: state(admin, 1) == "gone", what="for the loss")
    for seed in range(3):
        ask(engine, seed, "gone")
    for seed in range(3):
        ask_until_loaded(engine, seed, "elsewhere")
    admin.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
    for seed in range(3):
        assert ask(engine, seed, "without").loaded_tokens == CHUNKS * CHUNK_TOKENS
    settle(engine, pool)


def test_a_drive_is_added_and_another_drained_and_removed(
    engine: MiniEngine, pool: Pool, admin: GrpcDriveAdmin, tmp_path: Path
) -> None:
    for seed in range(3):
        ask(engine, seed, "first")
    added = admin.add_drive(AddDriveRequest(SIZE_BYTES, str(blank(tmp_path / "three"))), deadline_s=DEADLINE_S)
    assert (added.number, added.state) == (3, "online")
    ask(engine, 3, "before it is known")
    is_told(engine, pool)
    for number in (0, 2):
        admin.drain_drive(DrainDriveRequest(number), deadline_s=DEADLINE_S)
    ask(engine, 4, "while they are drained")
    assert 3 in drives_of(pool)
    for number in (0, 2):
        until(lambda number=number: state(admin, number) == "drained", what="for its end")  # type: ignore[misc]
    assert drives_of(pool) == {1, 3}
    assert admin.remove_drive(RemoveDriveRequest(0), deadline_s=DEADLINE_S) == 0
    for seed in range(3):
        ask_until_loaded(engine, seed, "after")
    settle(engine, pool)


def test_an_engine_that_comes_later_reads_what_was_written_to_an_added_drive(
    engine: MiniEngine, pool: Pool, admin: GrpcDriveAdmin, address: str, start: EngineFactory, tmp_path: Path
) -> None:
    """And one that has not followed yet takes it for a miss: nothing of it is looked for on another drive."""
    idle = start(service=GrpcChunkService(address))
    ask(idle, 0, "idle")
    admin.add_drive(AddDriveRequest(SIZE_BYTES, str(blank(tmp_path / "three"))), deadline_s=DEADLINE_S)
    is_told(engine, pool)
    for number in (1, 2):
        admin.drain_drive(DrainDriveRequest(number), deadline_s=DEADLINE_S)
    for seed in range(1, 8):
        ask(engine, seed, "writer")
    assert 3 in drives_of(pool)
    for seed in range(1, 8):
        ask_until_loaded(idle, seed, "reader")
    assert dict(pool.status(deadline_s=1).counters).get("dropped_chunks", 0) == 0
    for one in (engine, idle):
        settle(one, pool)
