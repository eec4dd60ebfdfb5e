"""One engine process of the quickstart: start vLLM with the connector, answer the document once, say how it went.

Reads one JSON object (:class:`EngineTask`) from standard input; prints lines of JSON on the descriptor named there:
``{"event": "ready"}``, then ``{"event": "answered", ...}``; ends when standard input closes, so that whoever started
it can first see what has reached the pool.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class EngineTask:
    """``token_ids``: the prompt. ``answer_tokens``: how many to generate, greedily. ``report_fd``: where to report.

    ``kv_transfer_config``: None for an engine without any connector.
    """

    model: str
    token_ids: tuple[int, ...]
    answer_tokens: int
    max_model_len: int
    kv_cache_gib: int
    kv_transfer_config: dict[str, Any] | None
    report_fd: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    task = EngineTask(**json.loads(sys.stdin.readline()))
    report = os.fdopen(task.report_fd, "w", buffering=1)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(task.kv_cache_gib))
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    started_s = time.monotonic()
    engine = LLM(
        model=task.model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=task.max_model_len,
        max_num_seqs=4,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        kv_transfer_config=task.kv_transfer_config,
    )
    # The first forward pass of any engine pays for its kernels: an unrelated prompt pays it, in every phase alike.
    warm_up = [int(token) for token in reversed(task.token_ids[:WARM_UP_TOKENS])]
    _generate(engine, warm_up, SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True))
    print(json.dumps({"event": "ready", "start_s": time.monotonic() - started_s}), file=report)
    greedy = SamplingParams(max_tokens=task.answer_tokens, temperature=0, detokenize=False, ignore_eos=True)
    output = _generate(engine, list(task.token_ids), greedy)
    answer = {
        "event": "answered",
        "ttft_s": output.metrics.first_token_latency,
        "cached_tokens": output.num_cached_tokens,
        "answer_token_ids": list(output.outputs[0].token_ids),
        "counters": _counters(engine),
    }
    print(json.dumps(answer), file=report)
    sys.stdin.read()


def _generate(engine: Any, token_ids: list[int], sampling: Any) -> Any:
    return engine.generate({"prompt_token_ids": token_ids}, sampling, use_tqdm=False)[0]


def _counters(engine: Any) -> dict[str, float]:
    """The connector's metrics, as the engine publishes them."""
    prefix = "vllm:meshfusion_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith(prefix)
    }


if __name__ == "__main__":
    main()
