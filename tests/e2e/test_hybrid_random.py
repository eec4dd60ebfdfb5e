"""Random requests at two engines on one pool: what both write, load and lose never changes an answer.

Only models whose answers, on a CPU, do not change by more than the tolerance with the batch and the steps they are
computed in. LFM2 and Qwen3-Next (bfloat16) are none: they missed it where nothing had been cached.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Engines
from tests.e2e.hybrid_models import HYBRID_MODELS
from tests.e2e.hybrid_random import Drive

ROUNDS = 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {"max_num_batched_tokens": 96}),
        ("gemma4", {"num_gpu_blocks_override": 120}),
        ("llama4", {"prefix_cache_retention_interval": 0, "max_num_batched_tokens": 160}),
        ("falcon-h1", {"max_num_batched_tokens": 192}),
    ],
)
def test_whatever_is_asked_the_answers_are_right(
    name: str, options: dict[str, Any], engines: Engines, tmp_path: Path
) -> None:
    drive = Drive(HYBRID_MODELS[name], tmp_path, engines, seed=len(name), **options)
    try:
        for _ in range(ROUNDS):
            drive.round()
        drive.kill()
        drive.round()
        drive.kill(service=True)
        drive.round()
        counts = drive.close()
    finally:
        drive.daemon.kill()
    assert drive.compared > ROUNDS
    assert counts["loaded_blocks"] > 0
    assert counts["chunks_committed"] > 0
    assert counts.get("digest_mismatches", 0) == 0
