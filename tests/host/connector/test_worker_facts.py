"""Workers that are not alike do not share a holder: the rank that differs, or is off, is named, and in what."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from meshfusion.host.connector.config import parse_connector_config
from meshfusion.host.connector.off_note import WhyOff
from meshfusion.host.connector.vllm.connector import MeshFusionConnector
from meshfusion.host.connector.vllm.handshake import WorkerOff, agreed_facts
from meshfusion.host.connector.vllm.messages import StepOrders, WorkerFacts
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.identity import Identity
from meshfusion.host.kv.resume import GroupPlan, WholePrefix
from meshfusion.host.path.block_layout import Runs
from meshfusion.host.path.flexpath.run_dir import ENVIRONMENT
from meshfusion.jbof.errors import UnsupportedError

FORM = ChunkForm((GroupPlan(0, WholePrefix(), 16, 64),), (4096,), 2)


def identity(**changes: Any) -> dict[str, Any]:
    made = Identity(json.dumps({"weights": "w", "kv": {"layers": ["a", "b"]}, **changes}))
    return {"identity": made.digest, "identity_json": made.canonical_json}


ZERO = WorkerFacts(**identity(), form=FORM, hash_block_tokens=16, block_count=90, runs=Runs(4096, 4096))
ONE = replace(ZERO, rank=1, runs=Runs(512, 4096), selftest_bytes=5)


def test_where_memory_lies_may_differ_and_ranks_are_put_in_order() -> None:
    assert agreed_facts({1: ONE, 0: ZERO}, 2) == (ZERO, ONE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (identity(weights="v"), "its identity differs in weights"),
        (identity(kv={"layers": ["a", "c"]}), r"its identity differs in kv.layers\[1\]"),
        ({"form": replace(FORM, unit_bytes=(2048,))}, "its form is"),
        ({"hash_block_tokens": 8}, "its hash_block_tokens is 8, not 16"),
        ({"block_count": 89}, "its block_count is 89, not 90"),
        ({"access": "nvmeof"}, "its access is 'nvmeof', not 'local'"),
        ({"rank": 0}, "it calls itself rank 0"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], named: str) -> None:
    off = agreed_facts({0: ZERO, 1: replace(ONE, **changes)}, 2)
    assert isinstance(off, WorkerOff)
    assert off.why is WhyOff.WORKERS
    assert re.search(f"rank 1 is not like that of rank 0: {named}", off.reason), off.reason


@pytest.mark.parametrize(
    ("by_rank", "named"),
    [
        ({}, r"ranks \[0, 1\] have not"),
        ({0: ZERO}, r"ranks \[1\] have not"),
        ({1: ONE}, r"ranks \[0\] have not"),
        ({0: ZERO, 1: object()}, r"ranks \[1\] have not"),
        ({0: ZERO, 1: ONE, 2: replace(ONE, rank=2)}, "of 2 workers.* 3 answered"),
    ],
)
def test_all_ranks_must_have_proven_theirs(by_rank: dict[int, object], named: str) -> None:
    off = agreed_facts(by_rank, 2)
    assert isinstance(off, WorkerOff)
    assert off.why is WhyOff.WORKERS
    assert re.search(named, off.reason), off.reason


OFF = WorkerOff(WhyOff.MEMORY, "pages overlap", "report it")


@pytest.mark.parametrize(
    ("by_rank", "rank_count", "reason"),
    [
        ({0: OFF}, 1, "pages overlap"),
        ({0: OFF, 1: ONE}, 2, "rank 0 of 2: pages overlap"),
        ({1: OFF, 0: ZERO}, 2, "rank 1 of 2: pages overlap"),
        ({1: OFF}, 2, "rank 1 of 2: pages overlap"),  # it says more than that one is missing
        ({2: OFF, 0: ZERO, 1: OFF}, 3, "ranks [1, 2], rank 1 of 3: pages overlap"),
        ({0: replace(ZERO, block_count=1), 1: OFF}, 2, "rank 1 of 2: pages overlap"),
    ],
)
def test_one_that_is_off_turns_off_all(by_rank: dict[int, object], rank_count: int, reason: str) -> None:
    assert agreed_facts(by_rank, rank_count) == replace(OFF, reason=reason)


def scheduler_half(on_unsupported: str) -> MeshFusionConnector:
    """Of an engine of two ranks, whose service is there, before its workers have told."""
    made = object.__new__(MeshFusionConnector)
    made._role = KVConnectorRole.SCHEDULER
    made._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    made.config = parse_connector_config({"service": "unix:///unused", "on_unsupported": on_unsupported})
    made._service = Mock()
    made._scheduler = made._worker = made._client = made._facts = None
    made._step_ns, made._former_counts, made.step_times_ns = 0, {}, deque()
    return made


CASES = pytest.mark.parametrize(
    ("told", "named", "why"),
    [
        ({0: ZERO, 1: OFF}, "rank 1 of 2: pages overlap", WhyOff.MEMORY),
        ({0: ZERO, 1: replace(ONE, block_count=89)}, "rank 1 is not like", WhyOff.WORKERS),
        ({0: ZERO}, r"ranks \[1\] have not", WhyOff.WORKERS),
    ],
)


@CASES
def test_an_engine_refuses_to_start_with_such_a_rank(told: dict[int, Any], named: str, why: WhyOff) -> None:
    connector = scheduler_half("refuse")
    service: Any = connector._service
    with pytest.raises(UnsupportedError, match=named):
        connector.set_xfer_handshake_metadata(told)
    service.close.assert_called_once_with()


@CASES
def test_or_serves_without_cache_for_all(
    told: dict[int, Any], named: str, why: WhyOff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "run"))
    connector = scheduler_half("serve_without_cache")
    service: Any = connector._service
    connector.set_xfer_handshake_metadata(told)
    service.close.assert_called_once_with()
    assert isinstance(connector._facts, WorkerOff)
    assert re.search(named, connector._facts.reason)
    request: Any = None
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.build_connector_meta(request) == StepOrders(), "also the ranks that are well get nothing to do"
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {f"without_cache_{why.value}": 1}
    connector.shutdown()
