"""The main job over RDMA, in a guest: vLLM, the service, the kernel's target; bytes go straight to KV memory."""

from __future__ import annotations

from typing import Any

from tests.lab.conftest import RunScript

SCRIPT = "guest_engine.py"
MEMORY_MIB = 7000
DEADLINE_S = 600.0
SAME = {"tokens": True, "logprobs": True}
PROMPT_CACHED = 512  # of 600 tokens, whole chunks of 128
PROMPT_BYTES = 4 * (512 << 10)


def test_a_fresh_engine_loads_what_another_computed_over_both_paths_into_its_tensors(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "reuse", MEMORY_MIB, DEADLINE_S)
    assert report["cold_cached"] == 0
    assert report["warm"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["saved"] == {"inside": PROMPT_BYTES, "outside": 0}
    assert report["loaded"] == {"inside": PROMPT_BYTES, "outside": 0}, "a bounce buffer"
    assert report["counts"]["loaded_bytes"] == PROMPT_BYTES
    assert min(report["sent_bytes"]) > PROMPT_BYTES // 8, "one of the paths was not used"
    assert sum(report["sent_bytes"]) > PROMPT_BYTES, "the bytes did not go over the wire"


def test_lost_paths_an_empty_target_and_a_fenced_engine_cost_hits_and_nothing_else(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "trouble", MEMORY_MIB, DEADLINE_S)
    assert report["one path"] == {**SAME, "cached": PROMPT_CACHED}
    assert right(report["while the target is empty"])
    assert report["target back"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["stopped with grants"] > 0
    assert (report["grants left"], report["exports left"]) == (0, 0)
    assert report["other"] == {**SAME, "cached": PROMPT_CACHED}
    assert right(report["woken"])
    assert not report["readmitted"]
    assert report["woken again"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["untouched"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["mismatches"] == [0, 0]


def right(answer: dict[str, Any]) -> bool:
    """Whatever was reused: what was lost may have come back in time."""
    return {name: answer[name] for name in SAME} == SAME
