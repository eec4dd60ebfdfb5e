"""One engine process of the quickstart: start vLLM with the connector, answer the document, say how it went.

The first process answers twice: the second time from its own prefix cache. That is the answer a process that takes its
KV from the pool must give, token for token: both recompute one token over KV that exists. The cold answer itself need
not be the same: a prefill of 4,096 tokens and a step of one token round differently; a near tie may fall either way.

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
    """``token_ids``: the prompt, and one token more, used when the prompt would be whole blocks. ``answer_tokens``: how
    many to generate, greedily. ``ask_again``: a second time, from its own cache. ``report_fd``: where to report.
    ``kv_transfer_config``: None for an engine without any connector.
    """

    model: str
    token_ids: tuple[int, ...]
    answer_tokens: int
    max_model_len: int
    kv_cache_gib: int
    kv_transfer_config: dict[str, Any] | None
    report_fd: int
    ask_again: bool = False

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
    _generate(
        engine, warm_up, SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)
    )
    print(json.dumps({"event": "ready", "start_s": time.monotonic() - started_s}), file=report)
    greedy = SamplingParams(max_tokens=task.answer_tokens, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)
    prompt = _prompt(task.token_ids, engine.llm_engine.vllm_config.cache_config.block_size)
    output = _generate(engine, prompt, greedy)
    again = _generate(engine, prompt, greedy) if task.ask_again else output
    answer = {
        "event": "answered",
        "prompt_tokens": len(prompt),
        "ttft_s": output.metrics.first_token_latency,
        "cached_tokens": output.num_cached_tokens,
        "token_ids": list(output.outputs[0].token_ids),
        "again_ttft_s": again.metrics.first_token_latency,
        "again_token_ids": list(again.outputs[0].token_ids),
        "again_logprobs": [next(iter(chosen.values())).logprob for chosen in again.outputs[0].logprobs],
        "counters": _counters(engine),
    }
    print(json.dumps(answer), file=report)
    sys.stdin.read()


def _prompt(token_ids: tuple[int, ...], block_tokens: int) -> list[int]:
    """All but the last token, unless that is whole blocks: an engine's own cache never covers a whole prompt, it would
    recompute the last block where the pool lets it recompute one token, and the two could not be compared."""
    length = len(token_ids) - 1
    return list(token_ids if length % block_tokens == 0 else token_ids[:length])


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
