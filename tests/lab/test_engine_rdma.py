"""The main job over RDMA, in a guest: vLLM, the service, the kernel's target; bytes go straight to KV memory."""

from __future__ import annotations

from tests.lab.conftest import RunScript

SCRIPT = "guest_engine.py"
MEMORY_MIB = 7000
SAME = {"tokens": True, "logprobs": True}
PROMPT_CACHED = 512  # of 600 tokens, whole chunks of 128
PROMPT_BYTES = 4 * (512 << 10)


def test_a_fresh_engine_loads_what_another_computed_over_both_paths_into_its_tensors(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "reuse", MEMORY_MIB)
    assert report["cold_cached"] == 0
    assert report["warm"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["saved"] == {"inside": PROMPT_BYTES, "outside": 0}
    assert report["loaded"] == {"inside": PROMPT_BYTES, "outside": 0}, "a bounce buffer"
    assert report["counts"]["loaded_bytes"] == PROMPT_BYTES
    assert min(report["sent_bytes"]) > PROMPT_BYTES // 8, "one of the paths was not used"
    assert sum(report["sent_bytes"]) > PROMPT_BYTES, "the bytes did not go over the wire"


def test_lost_paths_an_empty_target_and_a_fenced_engine_cost_hits_and_nothing_else(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "trouble", MEMORY_MIB)
    assert report["one path"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["while the target is empty"] == {**SAME, "cached": 0}
    assert report["target back"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["stopped with grants"] > 0
    assert (report["grants left"], report["exports left"]) == (0, 0)
    assert report["other"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["woken"] == {**SAME, "cached": 0}
    assert not report["readmitted"]
    assert report["woken again"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["untouched"] == {**SAME, "cached": PROMPT_CACHED}
    assert report["mismatches"] == [0, 0]
