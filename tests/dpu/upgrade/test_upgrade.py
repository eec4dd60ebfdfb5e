"""Pools that earlier versions made, and left without closing them: they open, serve, and take more."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool import Pool, check_pool, inspect_pool
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.pool_cases import Holder
from tests.dpu.upgrade.record import CHUNK_TOKENS, COMMITTED, IDENTITY, UNCOMMITTED, UNIT_COUNT, key, unit
from tests.host.support.waiting import until

HERE = Path(__file__).resolve().parent
RECORDED = sorted(path.stem for path in HERE.glob("*.json"))


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The pool, at a place of its own, and what was told of it."""
    directory = tmp_path / "pool"
    directory.mkdir(mode=0o700)
    with tarfile.open(HERE / f"{request.param}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory, json.loads((HERE / f"{request.param}.json").read_text())


def test_there_is_one() -> None:
    assert RECORDED, "without a recorded pool nothing is tested here"
    assert {path.stem for path in HERE.glob("*.xz")} == {f"{name}.tar" for name in RECORDED}


def test_it_is_whole_before_and_after_it_is_served(recorded: tuple[Path, dict[str, Any]]) -> None:
    directory, told = recorded
    for _ in range(2):
        report = check_pool(directory, lambda done, total: None)
        assert (report.chunks_checked, list(report.damaged)) == (len(COMMITTED), [])
        with Pool.open(directory) as pool:
            assert pool.pool_uuid == told["pool_uuid"]
    assert inspect_pool(directory).committed_chunk_count == len(told["chunks"])


def test_each_chunk_is_found_with_the_bytes_that_were_written(recorded: tuple[Path, dict[str, Any]]) -> None:
    directory, told = recorded
    with Pool.open(directory) as pool:
        request = api.AttachRequest("ab" * 16, "vllm", "1", "h", 1, IDENTITY, 1)
        holder = pool.attach(request, deadline_s=20.0)
        assert holder.epoch > told["epoch"]
        keys = tuple(map(key, (*COMMITTED, UNCOMMITTED)))
        group = api.GroupKeys(0, keys, (0,) * len(keys))
        reply = pool.match(api.MatchRequest(holder.holder_id, "r", CHUNK_TOKENS, (group,)), deadline_s=20.0)
        assert reply.chunk_count == len(COMMITTED), "what was not committed is not there (rule 1)"
        (namespace,) = holder.namespaces
        data = Path(namespace.path).read_bytes()
        for number, chunk in enumerate(reply.chunks):
            (shard,) = chunk.shards
            assert chunk.identity == IDENTITY
            assert [digest.hex() for digest in shard.unit_digests] == told["chunks"][chunk.key.hex()]
            for index in range(UNIT_COUNT):
                lba = shard.extent.lba + shard.payload_lba_offset + index * shard.unit_lba_count
                start = lba * namespace.lba_bytes
                assert data[start : start + shard.unit_bytes] == unit(number, index).tobytes()


def test_it_takes_more_and_its_former_holder_is_fenced(recorded: tuple[Path, dict[str, Any]]) -> None:
    directory, told = recorded
    with Pool.open(directory) as pool:
        holder = Holder(pool)
        assert holder.put(1000), "space that was promised to a former holder is not needed"
        until(lambda: told["holder_id"] not in {h.holder_id for h in pool.status(deadline_s=1.0).holders})
        with pytest.raises(Exception, match="fenced"):
            Holder(pool, told["holder_id"])
        for i in range(1001, 1012):  # more than there is room for: segments of the former version are reclaimed
            until(lambda i=i: holder.put(i))  # type: ignore[misc]
        holder.leave()
    report = check_pool(directory, lambda done, total: None)
    assert list(report.damaged) == []
    assert report.chunks_checked > 6


def test_its_index_is_made_anew_from_the_medium(recorded: tuple[Path, dict[str, Any]]) -> None:
    directory, told = recorded
    shutil.rmtree(directory / "index")
    rebuilt = CliRunner().invoke(mfctl, ["pool", "rebuild-index", str(directory), "--format", "json"])
    assert rebuilt.exit_code == 0, rebuilt.stderr
    with Pool.open(directory) as pool:
        found = {key(number).hex() for number in COMMITTED if pool.get_chunk(key(number), deadline_s=1.0)}
        assert found == told["chunks"].keys()
    assert list(check_pool(directory, lambda done, total: None).damaged) == []
