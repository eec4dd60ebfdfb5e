"""An engine process of the acceptance test, which answers prompts and shows its KV blocks.

Reads one JSON object a line from standard input: first an :class:`EngineTask`, then calls ``{"op": ..., ARGUMENTS}``;
answers each with one line on the descriptor that the task names. Ends when standard input closes. The engine's core
runs in this process: blocks are read where the model reads them, through the engine's own tensors and not through what
the connector knows of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Final

from meshfusion.tools.model_kv import rule_in_words
from meshfusion.tools.verify.prompts import LONGEST_CHUNKS

LOGPROBS: Final = 5
SETTLE_S: Final = 120.0
_SAVE_ENDS: Final = ("chunks_committed", "commits_refused", "saves_failed")


@dataclass(frozen=True, slots=True)
class EngineTask:
    """``options``: of ``vllm.LLM``. ``may_load``: else its lookups find nothing, and everything is its own."""

    options: dict[str, Any]
    may_load: bool
    report_fd: int = -1

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class VerifiedEngine:
    """The calls. Their results are plain JSON."""

    def __init__(self, task: EngineTask) -> None:
        self._path = _PathMessages()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        from vllm import LLM

        self._llm = LLM(**task.options)
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._tables: dict[str, list[list[int]]] = {}  # of each load: the blocks of each KV group
        self._local_tokens: dict[str, int] = {}
        self._loaded: list[list[tuple[int, str]]] = [[] for _ in self._groups]
        self._watch(may_load=task.may_load)

    @property
    def _groups(self) -> Any:
        return self._scheduler.kv_cache_config.kv_cache_groups

    @property
    def _side(self) -> Any:
        return self._scheduler.connector.scheduler_side

    # ---- calls ---------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What a report names."""
        import torch
        from vllm.platforms import current_platform

        from meshfusion.host.kv.identity import installed_engine_version

        config, facts = self._llm.llm_engine.vllm_config, self._scheduler.connector._facts
        return {
            "versions": {
                "meshfusion": version("meshfusion"),
                "vllm": installed_engine_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "platform": str(current_platform.device_type),
            "device": str(current_platform.get_device_name() or platform.machine()),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "vocabulary": int(config.model_config.get_vocab_size()),
            "context_tokens": int(config.model_config.max_model_len),
            "identity": facts.identity.hex(),
            "chunk_tokens": facts.form.chunk_tokens,
            "groups": [
                {
                    "spec": type(group.kv_cache_spec).__name__,
                    "needs": rule_in_words(plan.rule),
                    "layers": len(group.layer_names),
                    "block_tokens": plan.block_tokens,
                    "block_bytes": unit_bytes,
                    "is_loaded": any(plan.needed_blocks(chunks) for chunks in range(1, LONGEST_CHUNKS + 1)),
                }
                for group, plan, unit_bytes in zip(self._groups, facts.form.plans, facts.form.unit_bytes, strict=True)
            ],
        }

    def answer(self, *, prompts: list[list[int]], answer_tokens: int, is_cold: bool = False) -> list[dict[str, Any]]:
        """All at once. ``is_cold``: compute everything, though it may be cached."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=answer_tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=LOGPROBS,
            skip_reading_prefix_cache=is_cold,
        )  # fmt: skip
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [_answer(output) for output in self._llm.generate(inputs, sampling, use_tqdm=False)]

    def forget(self) -> None:
        """Empty the engine's own prefix cache. Blocks that are being saved are waited for."""
        self._step_until(self._llm.reset_prefix_cache, "the engine's own prefix cache was not emptied")

    def settle(self) -> dict[str, int]:
        """Wait until what is to be saved has been saved, or not. The connector's counters."""
        self._step_until(lambda: not any(self._side.gauges().values()) and not self._open_saves(), "saves did not end")
        return dict(self._side.counts())

    def path(self) -> str:
        """How bytes go, in the words of the engine's log."""
        return self._path.last

    def blocks(self) -> list[dict[str, list[str]]]:
        """For each KV group the digests of what all cached blocks hold, by the engine's hash."""
        found: list[dict[str, list[str]]] = [{} for _ in self._groups]
        for block in self._scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                group, name = _group_and_name(block.block_hash)
                found[group].setdefault(name, []).append(self._digest(group, block.block_id))
        return found

    def loaded(self) -> list[list[tuple[str, str]]]:
        """For each KV group hash and digest of the blocks loaded since the last call, as they were when the load ended:
        the engine may compute the last token of a prompt once more, into its block."""
        loaded, self._loaded = self._loaded, [[] for _ in self._groups]
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        return [[(_name(blocks[block_id].block_hash), digest) for block_id, digest in group] for group in loaded]

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _watch(self, *, may_load: bool) -> None:
        """Which blocks the engine gives to loads is learned from its calls, not from the connector's orders."""
        connector = self._scheduler.connector
        ask, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        update = connector.update_connector_output

        def asked(request: Any, local_tokens: int) -> Any:
            self._local_tokens[request.request_id] = local_tokens
            return ask(request, local_tokens) if may_load else (0, False)

        def was_allocated(request: Any, blocks: Any, external_tokens: int) -> None:
            if external_tokens:
                first = self._local_tokens[request.request_id]
                self._tables[request.request_id] = [
                    self._real_blocks(ids, group.kv_cache_spec.block_size, first, first + external_tokens)
                    for group, ids in zip(self._groups, blocks.get_block_ids(), strict=True)
                ]
            allocated(request, blocks, external_tokens)

        def updated(output: Any) -> None:
            failed = output.invalid_block_ids or set()
            lost = getattr(output, "failed_recving", None) or set()
            for request_id in (output.finished_recving or set()) - set(lost):
                for group, ids in enumerate(self._tables.pop(request_id, [])):
                    self._loaded[group] += [(i, self._digest(group, i)) for i in ids if i not in failed]
            update(output)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = was_allocated
        connector.update_connector_output = updated

    def _real_blocks(self, ids: list[int], block_tokens: int, first: int, last: int) -> list[int]:
        null = self._scheduler.kv_cache_manager.block_pool.null_block.block_id
        return [i for i in ids[first // block_tokens : last // block_tokens] if i != null]

    def _digest(self, group: int, block_id: int) -> str:
        import torch

        digest = hashlib.sha256()
        for tensor in self._pages(group):
            digest.update(tensor[block_id].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _pages(self, group: int) -> Iterator[Any]:
        """Every tensor of a group, first by block."""
        layers = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        block_count = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        for name in self._groups[group].layer_names:
            held = layers[name].kv_cache
            for tensor in held if isinstance(held, tuple | list) else (held,):
                yield tensor.unflatten(0, (block_count, -1))  # the kernel's blocks may be smaller

    def _open_saves(self) -> int:
        """Every chunk with a place to go ends up committed, refused or failed."""
        self._side._take_events()  # an idle engine makes no steps, and so does not see how the last commits ended
        counts = self._side.counts()
        return int(counts.get("saves_granted", 0) - sum(counts.get(name, 0) for name in _SAVE_ENDS))

    def _step_until(self, condition: Callable[[], Any], problem: str) -> None:
        end_s = time.monotonic() + SETTLE_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{problem} within {SETTLE_S:.0f} s: {self._side.gauges()}")
            self._llm.llm_engine.step()
            time.sleep(0.005)


class _PathMessages(logging.Handler):
    """Remembers what the log says of the path that is taken."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.last = ""
        log = logging.getLogger("meshfusion.path")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO and record.getMessage().startswith(("path ", "connected to ")):
            self.last = record.getMessage()


def _group_and_name(block_hash: Any) -> tuple[int, str]:
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    return int(get_group_id(block_hash)), bytes(get_block_hash(block_hash)).hex()


def _name(block_hash: Any) -> str:
    return "" if block_hash is None else _group_and_name(block_hash)[1]


def _answer(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [{token: entry.logprob for token, entry in at.items()} for at in completion.logprobs],
        "cached_tokens": output.num_cached_tokens,
        "ttft_s": output.metrics.first_token_latency,
    }


def main() -> None:
    task = EngineTask(**json.loads(sys.stdin.readline()))
    report = os.fdopen(task.report_fd, "w", buffering=1)
    engine = VerifiedEngine(task)
    print(json.dumps({"event": "ready", "value": engine.facts()}), file=report)
    for line in sys.stdin:
        call = json.loads(line)
        name = call.pop("op")
        print(json.dumps({"event": name, "value": getattr(engine, name)(**call)}), file=report)
    sys.stdout.flush()
    os._exit(0)  # what the engine's libraries do at exit is not what is tested


if __name__ == "__main__":
    main()
