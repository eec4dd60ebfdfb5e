"""Engines in processes of their own that save and load all the time, while what they depend on is killed.

Everything of the connector is real (lookups, saves, the pool client, the path to the medium); the engine around it is
``tests/host/support/mini_engine.py``: its KV is a function of the tokens, so that after a load every byte is compared
with what the tokens say, whatever the digests say.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.host.pool_events import Committed, Dropped, Event
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.errors import MeshFusionError
from tests.host.support.kv_memory import BLOCK_TOKENS, layer_outermost
from tests.host.support.mini_engine import MiniEngine
from tests.host.support.mini_request import Request, make_request

PAGE_BYTES, LAYERS, BLOCKS = 16 << 10, 2, 64
CHUNK_TOKENS = 2 * BLOCK_TOKENS
CHUNKS_MIN, CHUNKS_MAX = 2, 5  # of a prompt
REQUESTS_AT_ONCE = 2
REQUEST_PAUSE_S, STEP_PAUSE_S = 0.3, 0.03  # each look at a clock is a system call, and those are slow in such a guest
ATTACH_S, ANSWER_S = 60.0, 120.0
KERNELS = load_kernels(LAYERS * PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """``number`` of ``engine_count``; a prompt that nobody has asked for before comes every ``fresh_s``. ``path``: of
    the connector's configuration."""

    number: int
    engine_count: int
    address: str
    seed: int
    folder: Path
    fresh_s: float
    path: str = "rdma"

    @property
    def requests(self) -> Path:
        """A line of JSON for each request that has ended."""
        return self.folder / f"requests{self.number}.jsonl"


class Ended(NamedTuple):
    """A request: when it began and ended, which prompt it had, and how much of it was loaded and proven right."""

    began_s: float
    ended_s: float
    prompt: int
    prompt_tokens: int
    loaded_tokens: int


class EngineProcess:
    """It works from the start on, until it is told to be idle, and stays attached until it is told to leave.

    To be made before this process calls the service: gRPC does not survive a fork.
    """

    def __init__(self, setup: EngineSetup, *, is_reader: bool = False) -> None:
        """``is_reader``: it does nothing before :meth:`read`."""
        context = multiprocessing.get_context("fork")  # what it imports takes a guest half a minute
        self.setup = setup
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(setup, is_reader, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ended(self) -> list[Ended]:
        path = self.setup.requests
        lines = path.read_text().splitlines() if path.exists() else []
        return [Ended(*json.loads(line)) for line in lines if line.endswith("]")]

    def check(self) -> None:
        """Raises what ended it."""
        if self._pipe.poll() or not self._process.is_alive():
            raise AssertionError(self._said())

    def read(self, prompts: Sequence[int]) -> dict[str, Any]:
        """These, once each; what it has seen."""
        self._pipe.send(prompts)
        return self.idle()

    def idle(self) -> dict[str, Any]:
        """Everything it began has ended, and it stays attached; what it has seen."""
        return self._ask("idle")

    def leave(self) -> None:
        self._ask("leave")
        self._process.join(ANSWER_S)

    def _ask(self, question: str) -> dict[str, Any]:
        self._pipe.send(question)
        assert self._pipe.poll(ANSWER_S), f"engine {self.setup.number} does not answer"
        answer: dict[str, Any] = self._pipe.recv()
        assert "crash" not in answer, answer["crash"]
        return answer

    def _said(self) -> str:
        return str(self._pipe.recv()) if self._pipe.poll() else f"engine {self.setup.number} has ended"


def prompt_tokens(seed: int, prompt: int) -> list[int]:
    rng = random.Random(f"{seed} {prompt}")
    return rng.choices(range(50_000), k=CHUNK_TOKENS * rng.randint(CHUNKS_MIN, CHUNKS_MAX) + 5)


# ---- in the process ----------------------------------------------------------------------------------------------


def _run(setup: EngineSetup, is_reader: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        prompts = pipe.recv() if is_reader else ()
        worker = _Worker(setup, prompts)
        while not pipe.poll():
            worker.work()
        pipe.recv()
        pipe.send(worker.idle())
        while not pipe.poll():
            worker.engine.step()
            time.sleep(0.02)
        pipe.recv()
        worker.engine.close()
        pipe.send({})
    except BaseException:
        pipe.send({"crash": f"engine {setup.number}: {traceback.format_exc()}"})
        raise


class _Worker:
    def __init__(self, setup: EngineSetup, prompts: Sequence[int]) -> None:
        """``prompts``: only these, once each; none: any, all the time."""
        self._setup = setup
        self._rng = random.Random(f"{setup.seed} engine {setup.number}")
        self._next_prompt = iter(prompts) if prompts else self._any_prompts()
        self._is_through = not prompts
        self.engine = _attached(setup)
        self._listen()
        self._requests = setup.requests.open("a", buffering=1)
        self._begun: dict[str, tuple[float, int]] = {}
        self._count = 0
        self._fresh = 0
        self._fresh_from_s = self._begin_from_s = 0.0
        self._holders: set[str] = set()
        self._committed: set[bytes] = set()
        self._dropped: set[bytes] = set()
        self._told: Counter[str] = Counter()

    def work(self) -> None:
        engine = self.engine
        for request in [each for each in engine.requests.values() if each.stage == "done"]:
            self._end(request)
        if len(engine.requests) < REQUESTS_AT_ONCE and time.monotonic() >= self._begin_from_s:
            self._begin()
        engine.step()
        attachment = engine.client.attachment
        if attachment is not None:
            self._holders.add(attachment.holder_id)
        time.sleep(STEP_PAUSE_S)

    def idle(self) -> dict[str, Any]:
        engine = self.engine
        while not self._is_through:
            self.work()
        for request_id in list(engine.requests):
            engine.abort(request_id)
        engine.run(limit_s=ANSWER_S / 2)
        engine.assert_nothing_held()
        return {
            "committed": [key.hex() for key in sorted(self._committed)],
            "dropped": [key.hex() for key in sorted(self._dropped)],
            "counters": engine.side.counts(),
            "holders": sorted(self._holders),
            "told": dict(self._told),
        }

    def _begin(self) -> None:
        prompt = next(self._next_prompt, None)
        if prompt is None:
            self._is_through = not self.engine.requests
            return
        self._count += 1
        now_s = time.monotonic()
        self._begin_from_s = now_s + REQUEST_PAUSE_S
        request_id = f"{self._setup.number}-{self._count}"
        self._begun[request_id] = now_s, prompt
        self.engine.add(make_request(request_id, prompt_tokens(self._setup.seed, prompt)))

    def _end(self, request: Request) -> None:
        assert self.engine.is_right(request), f"wrong bytes after {request.loaded_tokens} loaded tokens"
        began_s, prompt = self._begun.pop(request.request_id)
        ended = Ended(began_s, time.monotonic(), prompt, request.num_tokens, request.loaded_tokens)
        self._requests.write(json.dumps(ended) + "\n")
        self.engine.abort(request.request_id)

    def _any_prompts(self) -> Iterator[int]:
        """Its own fresh ones at their times, and in between any that some engine has had."""
        while True:
            if time.monotonic() >= self._fresh_from_s:
                self._fresh_from_s = time.monotonic() + self._setup.fresh_s
                self._fresh += 1
                yield (self._fresh - 1) * self._setup.engine_count + self._setup.number
            else:
                yield self._rng.randrange(self._fresh * self._setup.engine_count)

    def _listen(self) -> None:
        """To what the client tells the scheduler."""
        take_events = self.engine.client.take_events

        def take() -> list[Event]:
            events = take_events()
            for event in events:
                self._told[type(event).__name__] += 1
                match event:
                    case Committed(visible_keys):
                        self._committed.update(visible_keys)
                    case Dropped(key):
                        self._dropped.add(key)
            return events

        vars(self.engine.client)["take_events"] = take


def _attached(setup: EngineSetup) -> MiniEngine:
    """The target may be starting."""
    end_s = time.monotonic() + ATTACH_S
    while True:
        kv = layer_outermost(blocks=BLOCKS, layers=LAYERS, page_bytes=PAGE_BYTES)
        kv.fill(setup.number)
        try:
            return MiniEngine(GrpcChunkService(setup.address), kv, KERNELS, path=setup.path)
        except MeshFusionError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.5)
