"""One vLLM process under the command of a test: ``python -m tests.e2e.engine_child SOCKET_FD``.

Each line on the socket is a call, ``{"op": ..., "deadline_s": ..., **arguments}``; each is answered by one line,
``{"value": ...}`` or ``{"error": ..., "kind": ...}``. Every call has a deadline: past it the process prints all its
stacks and ends. The engine core runs in this process unless VLLM_ENABLE_V1_MULTIPROCESSING says otherwise.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.engine_fixes import apply_engine_fixes
from tests.e2e.medium_gate import MediumGate
from tests.e2e.privileges import obey_permissions

LOGPROBS = 5
SETTLE_S = 20.0


class Engine:
    """The operations. Their results are plain JSON."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._gate = MediumGate()
        self._asked: list[tuple[str, int, int | None, int]] = []
        self._outputs: dict[str, Any] = {}
        self._computed_tokens = 0

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self, *, options: dict[str, Any]) -> float:
        """Make the engine; the seconds it took."""
        from vllm import LLM
        from vllm.config import KVEventsConfig

        if "kv_events_config" in options:
            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        began_s = time.monotonic()
        apply_engine_fixes()
        self._llm = LLM(**options)
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            self._count_computed_tokens()
        return time.monotonic() - began_s

    def why_not(self, *, options: dict[str, Any], as_user: bool = False) -> str:
        """Try to start an engine in a fork of this process, which stays without one; the error, "" if it starts."""
        import vllm.entrypoints.llm  # noqa: F401  (the slow part, once)

        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            try:
                if as_user:
                    obey_permissions()
                self.start(options=options)
                message = ""
            except Exception as error:
                message = _message(error)
            os.write(theirs, message.encode()[:60_000])
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            message = pipe.read()
        os.waitpid(pid, 0)
        return message

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    # ---- requests ------------------------------------------------------------------------------------------------

    def generate(self, *, prompts: list[list[int]], max_tokens: int, salt: str | None = None) -> list[dict[str, Any]]:
        """All prompts at once, greedily."""
        inputs = [_prompt(prompt, salt) for prompt in prompts]
        outputs = self._llm.generate(inputs, _sampling(max_tokens), use_tqdm=False)
        return [_answer(output) for output in outputs]

    def add(self, *, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._llm.llm_engine.add_request(request_id, _prompt(prompt, None), _sampling(max_tokens))

    def abort(self, *, request_ids: list[str]) -> None:
        self._llm.llm_engine.abort_request(request_ids)

    def step(self, *, count: int = 1, until: str = "", timeout_s: float = 20.0) -> int:
        """Step the engine ``count`` times, or until a gauge of the connector is not zero; the number of steps."""
        steps, end_s = 0, time.monotonic() + timeout_s
        while (not self.gauges()[until]) if until else steps < count:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{until!r} did not rise within {timeout_s} s: {self.gauges()}")
            self._step()
            steps += 1
        return steps

    def finish(self, *, timeout_s: float = 60.0) -> dict[str, dict[str, Any]]:
        """Step until every added request has ended; the answers of those that were not aborted."""
        end_s = time.monotonic() + timeout_s
        while self._llm.llm_engine.has_unfinished_requests():
            if time.monotonic() > end_s:
                raise TimeoutError(f"unfinished after {timeout_s} s: {self.gauges()}")
            self._step()
        outputs, self._outputs = self._outputs, {}
        return {name: _answer(output) for name, output in outputs.items()}

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                self._outputs[output.request_id] = output

    def reset(self, *, running: bool = False, connector: bool = False) -> bool:
        """Empty the engine's own prefix cache, so that the next request can only hit the pool.

        ``running``: preempt what runs, which then has to find its KV elsewhere; without it this fails while any does.
        Blocks that are being saved are kept as well, so that those saves are waited for.
        """
        end_s = time.monotonic() + SETTLE_S
        while not self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector):
            if not self.gauges()["pinned_saves"] or self.gauges()["running"] or time.monotonic() > end_s:
                return False
            self._step()
            time.sleep(0.005)
        return True

    def preempt(self) -> bool:
        """Preempt all that runs, and empty the engine's own prefix cache where that can be.

        False: it stays, since blocks of it are being loaded or saved. The connector hears nothing of either.
        """
        try:
            return bool(self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=False))
        except RuntimeError:  # raised once everything has been preempted
            return False

    # ---- looking in ----------------------------------------------------------------------------------------------

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def gauges(self) -> dict[str, int]:
        scheduler = self._scheduler
        running = len(scheduler.running)
        # Not the length of one of its queues: vLLM has had more than one for requests that wait.
        return {
            **scheduler.connector.scheduler_side.gauges(),
            "waiting": len(scheduler.requests) - running,
            "running": running,
        }

    def counts(self) -> dict[str, int]:
        side = self._scheduler.connector.scheduler_side
        side._take_events()  # an idle engine makes no steps, and so does not see how the last commits ended
        return dict(side.counts())

    def metrics(self) -> dict[str, float]:
        """The connector's counters that have risen, as Prometheus sees them."""
        found = ((metric.name, getattr(metric, "value", 0)) for metric in self._llm.get_metrics())
        return {name: value for name, value in found if name.startswith("vllm:meshfusion_") and value}

    def measures(self) -> dict[str, float]:
        return dict(self._scheduler.connector.scheduler_side.measures())

    def pool_status(self) -> dict[str, Any]:
        status = self._scheduler.connector._service.status(deadline_s=5.0)
        return {**dataclasses.asdict(status), "counters": dict(status.counters)}

    def settle(self, *, pool: bool = True, timeout_s: float = SETTLE_S) -> dict[str, Any]:
        """Step an idle engine until it holds nothing any more, here and in the pool, or say what it still holds."""
        end_s = time.monotonic() + timeout_s
        while True:
            held = {name: value for name, value in self.gauges().items() if value}
            held.update({"saves of unknown fate": fate} if (fate := _saves_under_way(self.counts())) else {})
            if not held and pool:
                status = self.pool_status()
                held = {name: status[name] for name in ("lease_count", "grant_count", "pinned_bytes") if status[name]}
            if not held:
                return {"counts": self.counts(), **({"pool": status} if pool else {})}
            if time.monotonic() > end_s:
                raise TimeoutError(f"still held after {timeout_s} s: {held}; {self.counts()}")
            self._step()
            time.sleep(0.005)

    def wait_for(self, *, counter: str, at_least: int, timeout_s: float = SETTLE_S) -> int:
        """Step until a counter of the connector has risen."""
        end_s = time.monotonic() + timeout_s
        while (value := self.counts().get(counter, 0)) < at_least:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{counter} is {value} after {timeout_s} s: {self.counts()}")
            self._step()
            time.sleep(0.005)
        return value

    def is_attached(self) -> bool:
        return self._scheduler.connector._client.attachment is not None

    def free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def computed_tokens(self) -> int:
        """Tokens that went through the model since the last call: what was not loaded, and what was decoded."""
        computed, self._computed_tokens = self._computed_tokens, 0
        return computed

    def _count_computed_tokens(self) -> None:
        schedule = self._scheduler.schedule

        def counted(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            self._computed_tokens += output.total_num_scheduled_tokens
            return output

        self._scheduler.schedule = counted

    # ---- trouble -------------------------------------------------------------------------------------------------

    def medium(self, *, reads: str = "", writes: str = "", delay_s: float = 0.0) -> None:
        """From now on loads or saves are ``slow``, ``blocked``, ``failing`` or, with "", as they should be."""
        self._gate.set(reads=reads, writes=writes, delay_s=delay_s)

    def fail_index(self, *, failing: bool) -> None:
        """From now on the index behaves as on a full filesystem."""
        self._gate.fail_index(failing)

    def record_questions(self) -> None:
        """From now on remember what the scheduler asks the connector and what it is told."""
        connector = self._scheduler.connector
        ask = connector.get_num_new_matched_tokens

        def asked(request: Any, local_tokens: int) -> Any:
            answer = ask(request, local_tokens)
            self._asked.append((request.request_id, local_tokens, answer[0], request.num_preemptions))
            return answer

        connector.get_num_new_matched_tokens = asked

    def questions(self) -> list[tuple[str, int, int | None, int]]:
        """Request, tokens it has locally, the answer (None: ask again), and how often it has been preempted."""
        return self._asked


def _saves_under_way(counts: dict[str, int]) -> int:
    """Every chunk with a place to go ends up committed, refused or failed."""
    ends = ("chunks_committed", "commits_refused", "saves_failed")
    return counts.get("saves_granted", 0) - sum(counts.get(name, 0) for name in ends)


def _prompt(token_ids: list[int], salt: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids, **({"cache_salt": salt} if salt else {})}


def _sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=LOGPROBS)


def _answer(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    logprobs = [{token: entry.logprob for token, entry in at.items()} for at in completion.logprobs or ()]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
        "ended": completion.finish_reason,
    }


def _message(error: BaseException) -> str:
    """The error and what caused it: engines wrap what their parts say."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        lines.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return "\n".join(lines)


def main(descriptor: int, engine: Engine | None = None) -> None:
    channel = socket.socket(fileno=descriptor).makefile("rw", buffering=1)
    engine = engine or Engine()
    for line in channel:
        call = json.loads(line)
        operation: Callable[..., Any] = getattr(engine, call.pop("op"))
        faulthandler.dump_traceback_later(call.pop("deadline_s"), exit=True)
        try:
            reply = {"value": operation(**call)}
        except Exception as error:
            reply = {"error": _message(error), "kind": type(error).__name__}
        faulthandler.cancel_dump_traceback_later()
        channel.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what the engine library does at exit is not what is tested


if __name__ == "__main__":
    assert Path.cwd() == Path(__file__).parents[2], "run it from the project's root"
    main(int(sys.argv[1]))
