"""What is not known to be right does not start, and says in words what to change."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.pool import Pool
from meshfusion.host.path.flexpath.run_dir import ENVIRONMENT as RUN_DIR
from meshfusion.tools.mfctl.engines_off import check_engines
from tests.e2e.conftest import Prompts
from tests.e2e.harness import ROOT, EngineProcess, Engines, Reference, assert_same, embedded, engines_in
from tests.e2e.hybrid_models import HYBRID_MODELS, make_hybrid_models


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One process that tries to start engines, one after another."""
    with engines_in(tmp_path_factory.mktemp("refusals")) as engines:
        yield engines.process()


def refusal(process: EngineProcess, model: Path, connector: dict[str, Any], **options: Any) -> str:
    """Why the engine does not start."""
    text = process.why_not(model, connector, **options)
    assert "next step: " in text, text or "it started"
    return text


def test_a_load_failure_policy_that_fails_requests(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    text = refusal(process, model, embedded(tmp_path / "pool"), transfer={"kv_load_failure_policy": "fail"})
    assert "UnsupportedError" in text
    assert "kv_load_failure_policy is 'fail'; set it to recompute" in text
    assert not (tmp_path / "pool").exists()


def test_a_kind_of_kv_that_is_not_served(process: EngineProcess, tmp_path: Path) -> None:
    model = HYBRID_MODELS["mamba2"]
    folder = make_hybrid_models(ROOT / ".cache", [model.name])[model.name]
    text = refusal(process, folder, embedded(tmp_path / "pool"), **model.options)
    assert "kv_cache_groups[0]: MambaSpec.num_prefill_checkpoint_blocks is 1, snapshots from within a step" in text
    assert not (tmp_path / "pool").exists()


def test_dummy_weights_have_no_identity(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    text = refusal(process, model, embedded(tmp_path / "pool"), load_format="dummy")
    assert "weights_id" in text


def test_every_wrong_key_is_named(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    connector = {**embedded(tmp_path / "pool", sise="1GiB"), "load_thread": 3, "lookup_deadline_ms": "soon"}
    text = refusal(process, model, connector)
    assert "ConfigProblemsError" in text
    assert "load_thread: unknown key; did you mean load_threads?" in text
    assert "pool.sise: unknown key; did you mean pool.size?" in text
    assert "lookup_deadline_ms = 'soon': must be a number" in text


def test_rdma_without_a_service_that_exports(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    text = refusal(process, model, {**embedded(tmp_path / "pool"), "path": "rdma"})
    assert "path = 'rdma': rdma needs a service that exports its pool; use service: instead of pool:" in text
    assert not (tmp_path / "pool").exists()


def test_rdma_on_a_machine_without_such_a_device(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    if Path("/sys/class/infiniband").exists() and os.listdir("/sys/class/infiniband"):
        pytest.skip("needs hardware: a machine without RDMA devices")
    text = refusal(process, model, {"service": f"unix://{tmp_path}/s", "path": "rdma"})
    assert "the rdma path is asked for and not possible: this machine shows no RDMA device" in text


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on tmpfs, which has no O_DIRECT; or takes the flag without a word of what it asks for, and then memory
    at whole pages is asked for, which PyTorch's is not."""
    with tempfile.TemporaryDirectory(prefix="meshfusion-e2e-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_block_that_the_pools_place_does_not_allow(process: EngineProcess, model: Path, in_memory: Path) -> None:
    text = refusal(process, model, {**embedded(in_memory / "pool"), "path": "block"})
    assert "UnsupportedError: the block path is asked for and not possible: " in text
    assert f"{in_memory}/pool/data" in text
    assert "Use the staged path" in text


def test_block_that_is_switched_off(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    text = refusal(process, model, {**embedded(tmp_path / "pool"), "path": "block", "direct_io": False})
    assert "path = 'block': block is O_DIRECT, which direct_io = false switches off" in text
    assert not (tmp_path / "pool").exists()


def test_a_pool_whose_directory_is_missing(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    text = refusal(process, model, embedded(tmp_path / "no" / "where"))
    assert f"the directory {tmp_path}/no does not exist" in text


def test_a_pool_that_another_process_owns(process: EngineProcess, model: Path, pool: Path) -> None:
    with Pool.open(pool):
        text = refusal(process, model, embedded(pool))
    assert f"PoolBusyError: the pool {pool} is in use by process {os.getpid()}" in text
    assert "service:" in text


def test_a_truncated_pool(process: EngineProcess, model: Path, pool: Path) -> None:
    os.truncate(pool / "data", 50 << 20)
    assert "FormatError" in (text := refusal(process, model, embedded(pool)))
    assert "truncated: 52428800 bytes of" in text


def test_a_pool_with_a_damaged_label(process: EngineProcess, model: Path, pool: Path) -> None:
    with (pool / "data").open("r+b") as data:
        for copy in range(2):
            data.seek(copy * 4096 + 20)
            data.write(b"\xff\xff")
    assert "FormatError" in (text := refusal(process, model, embedded(pool)))
    assert "label" in text


def test_a_pool_of_another_version(process: EngineProcess, model: Path, pool: Path) -> None:
    with (pool / "data").open("r+b") as data:
        for copy in range(2):
            data.seek(copy * 4096 + 8)
            data.write((99).to_bytes(4, "little"))
    text = refusal(process, model, embedded(pool))
    assert re.search(r"version 99", text)


def test_a_pool_with_a_damaged_index(process: EngineProcess, model: Path, pool: Path) -> None:
    with (pool / "index" / "data.mdb").open("r+b") as index:
        index.write(b"\xff" * 8192)  # both meta pages
    text = refusal(process, model, embedded(pool))
    assert "FormatError" in text
    assert str(pool / "index") in text


def test_a_folder_that_is_no_pool(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    (tmp_path / "somebody's file").touch()
    text = refusal(process, model, embedded(tmp_path))
    assert f"{tmp_path} is not a MeshFusion pool" in text


def test_a_service_that_is_down(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/nobody.sock"
    text = refusal(process, model, {"service": address})
    assert "ServiceUnavailableError" in text
    assert address in text


def test_a_pool_that_may_not_be_written(process: EngineProcess, model: Path, pool: Path) -> None:
    paths = [pool, *pool.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        text = refusal(process, model, embedded(pool), as_user=True)
    finally:
        for path in paths:
            path.chmod(0o700)
    assert str(pool) in text
    assert "Permission denied" in text


def test_a_folder_in_which_no_pool_can_be_made(process: EngineProcess, model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        text = refusal(process, model, embedded(tmp_path / "pool"), as_user=True)
    finally:
        tmp_path.chmod(0o700)
    assert str(tmp_path / "pool") in text
    assert "Permission denied" in text


def test_serving_without_the_cache(
    engines: Engines, model: Path, tmp_path: Path, prompts: Prompts, reference: Reference
) -> None:
    """Where the user asked for it: it starts, says so loudly, answers right, and caches nothing."""
    connector = {**embedded(tmp_path / "pool"), "on_unsupported": "serve_without_cache"}
    folder = tmp_path / "run"
    engine = engines.start(
        model, connector, transfer={"kv_load_failure_policy": "fail"}, environment={RUN_DIR: str(folder)}
    )
    for _ in range(2):
        answer = engine.answer(prompts.aligned)
        assert answer.cached == 0
        assert_same(answer, reference.answer(prompts.aligned))
        assert engine.call("reset")
    assert engine.call("metrics") == {"vllm:meshfusion_without_cache_engine": 1}
    (finding,) = check_engines(folder)
    assert finding.check == f"engine {engine.process.pid}"
    assert "kv_load_failure_policy" in finding.cause
    engine.close()
    assert list(folder.iterdir()) == [], "an engine that has ended is not shown"
    assert "MeshFusion is OFF for this engine, nothing is cached" in engine.words()
    assert not (tmp_path / "pool").exists()


def test_serving_without_the_cache_where_the_path_is_impossible(
    engines: Engines, model: Path, in_memory: Path, prompts: Prompts, reference: Reference, tmp_path: Path
) -> None:
    """It shows only when the pool is attached: that is given back."""
    connector = {**embedded(in_memory / "pool"), "path": "block", "on_unsupported": "serve_without_cache"}
    engine = engines.start(model, connector, environment={RUN_DIR: str(tmp_path)})
    for _ in range(2):
        answer = engine.answer(prompts.aligned)
        assert answer.cached == 0
        assert_same(answer, reference.answer(prompts.aligned))
        assert engine.call("reset")
    (finding,) = check_engines(tmp_path)
    assert finding.cause.startswith("runs without its cache (path): the block path is asked for and not possible")
    with Pool.open(in_memory / "pool") as pool:
        assert pool.status(deadline_s=5.0).committed_chunk_count == 0
    engine.close()
    words = engine.words()
    assert "MeshFusion is OFF for this engine, nothing is cached: the block path is asked for and not possible" in words


def test_a_forced_policy_starts(engines: Engines, model: Path, pool: Path, prompts: Prompts) -> None:
    connector = {**embedded(pool), "force_load_failure_policy": True}
    engine = engines.start(model, connector, transfer={"kv_load_failure_policy": "fail"})
    assert engine.answer(prompts.aligned).cached == 1024
