"""The engine process of the scheduler-time benchmark: scheduler and worker in this process, as in a real engine core.

Reads one JSON object (:class:`WorkloadTask`) from standard input, reports ``ready`` and ``done`` as lines of JSON on
the descriptor named there. Times of each scheduler step come from the connector itself (``step_times_ns``); the split
by hook, where it is asked for, is timed around the calls into its scheduler's half, in wall time and in CPU time of the
thread: where the two differ, the thread waited, for the interpreter's lock or for a core.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from meshfusion.tools.bench.tiny_llama import VOCABULARY

HOOKS = ("on_new_request", "matched_tokens", "allocated", "step", "workers_reported", "finished")
IDLE_SLEEP_S = 0.001  # as the engine core does after a pass that scheduled nothing
DRAIN_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkloadTask:
    """``requests`` prompts of ``tokens_min`` to ``tokens_max`` tokens, ``concurrency`` at a time, each answered by 2 to
    ``answer_tokens_max`` tokens.

    ``prefixes``: how many common prefixes there are. ``kv_blocks``: so few that the engine's own cache forgets them.
    """

    model: str
    kv_transfer_config: dict[str, Any]
    requests: int
    prefixes: int
    concurrency: int
    tokens_min: int
    tokens_max: int
    answer_tokens_max: int
    block_tokens: int
    kv_blocks: int
    seed: int
    forward_us_per_token: float  # 0: the forward pass is computed, on these cores; else it only waits, as on a device
    by_hook: bool
    report_fd: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(slots=True)
class StepSample:
    """One scheduler step: what the connector took, in all and by hook (nanoseconds of wall time and of CPU time)."""

    scheduled_tokens: int
    step_ns: int
    cpu_ns: int
    wall_by_hook_ns: dict[str, int]
    cpu_by_hook_ns: dict[str, int]


class StepTimer:
    """Collects a sample at the end of each step of one connector. ``by_hook``: also time the hooks of its scheduler's
    half one by one, which costs several microseconds a call and so makes the steps themselves look slower."""

    def __init__(self, connector: Any, *, by_hook: bool) -> None:
        self.samples: list[StepSample] = []
        self._connector = connector
        self._wall_ns: Counter[str] = Counter()
        self._cpu_ns: Counter[str] = Counter()
        for name in HOOKS if by_hook else ():
            setattr(connector.scheduler_side, name, self._timed(name, getattr(connector.scheduler_side, name)))
        self._build = connector.build_connector_meta
        connector.build_connector_meta = self._end_step

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return hook(*arguments)
            finally:
                self._cpu_ns[name] += time.thread_time_ns() - cpu_ns
                self._wall_ns[name] += time.perf_counter_ns() - wall_ns

        return timed

    def _end_step(self, scheduler_output: Any) -> Any:
        orders = self._build(scheduler_output)
        self.samples.append(
            StepSample(
                scheduler_output.total_num_scheduled_tokens,
                self._connector.step_times_ns[-1],
                self._cpu_ns.total(),
                dict(self._wall_ns),
                dict(self._cpu_ns),
            )
        )
        self._wall_ns.clear()
        self._cpu_ns.clear()
        return orders


def main() -> None:
    task = WorkloadTask(**json.loads(sys.stdin.readline()))
    report = os.fdopen(task.report_fd, "w", buffering=1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    llm = LLM(
        model=task.model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=task.tokens_max + task.answer_tokens_max,
        max_num_seqs=task.concurrency,
        block_size=task.block_tokens,
        num_gpu_blocks_override=task.kv_blocks,
        skip_tokenizer_init=True,
        kv_transfer_config=task.kv_transfer_config,
        distributed_executor_backend="uni",  # as engines with one device do: scheduler and worker share a process
    )
    if task.forward_us_per_token:
        wait_instead_of_computing(llm, task.forward_us_per_token)
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    run_requests(llm.llm_engine, StepTimer(connector, by_hook=False), warm_up_prompts(task), task)
    timer = StepTimer(connector, by_hook=task.by_hook)
    print(json.dumps({"event": "ready"}), file=report)
    started_s = time.monotonic()
    run_requests(llm.llm_engine, timer, prompts(task), task)
    done = {
        "event": "done",
        "seconds": time.monotonic() - started_s,
        "steps": [asdict(sample) for sample in timer.samples],
        "counters": connector.scheduler_side.counts(),
    }
    print(json.dumps(done), file=report)
    sys.stdin.read()


def wait_instead_of_computing(llm: Any, us_per_token: float) -> None:
    """A device would compute while these cores, and their caches, stay free for the scheduler."""
    import torch

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model

    def forward(input_ids: Any, *arguments: Any, **named: Any) -> Any:
        time.sleep(len(input_ids) * us_per_token / 1e6)
        return torch.zeros(len(input_ids), model.config.hidden_size, dtype=torch.bfloat16)

    model.forward = forward


def prompts(task: WorkloadTask) -> list[list[int]]:
    """Each is part of a common prefix, then tokens of its own."""
    rng = random.Random(task.seed)
    commons = [_tokens(rng, task.tokens_max) for _ in range(task.prefixes)]
    made = []
    for _ in range(task.requests):
        length = rng.randint(task.tokens_min, task.tokens_max)
        shared = rng.randint(length // 2, length)
        made.append(rng.choice(commons)[:shared] + _tokens(rng, length - shared))
    return made


def warm_up_prompts(task: WorkloadTask) -> list[list[int]]:
    """Unrelated to the workload's; they pay for kernels, imports and caches."""
    rng = random.Random(-1 - task.seed)
    return [_tokens(rng, task.tokens_min) for _ in range(2 * task.concurrency)]


def run_requests(engine: Any, timer: StepTimer, waiting: list[list[int]], task: WorkloadTask) -> None:
    """Keep ``task.concurrency`` requests in the engine until all are answered, then let its saves end."""
    from vllm import SamplingParams

    rng, running = random.Random(1), 0
    queue = list(reversed(waiting))
    while queue or running:
        while queue and running < task.concurrency:
            answer_tokens = rng.randint(2, task.answer_tokens_max)
            sampling = SamplingParams(max_tokens=answer_tokens, temperature=0, detokenize=False, ignore_eos=True)
            engine.add_request(f"bench-{id(queue)}-{len(queue)}", {"prompt_token_ids": queue.pop()}, sampling)
            running += 1
        running -= sum(output.finished for output in engine.step())
        if timer.samples and not timer.samples[-1].scheduled_tokens:
            time.sleep(IDLE_SLEEP_S)
    deadline_s = time.monotonic() + DRAIN_DEADLINE_S
    core = engine.engine_core.engine_core
    while core.scheduler.connector.has_pending_push_work() and time.monotonic() < deadline_s:
        engine.step()
        time.sleep(IDLE_SLEEP_S)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCABULARY) for _ in range(count)]


if __name__ == "__main__":
    main()
