"""Engine processes as the tests handle them, and what a right answer is."""

from __future__ import annotations

import functools
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.models import VOCABULARY
from tests.e2e.nursery import Nursery, Process

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 32
CHUNK_TOKENS = 128
UNIT_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS  # layers, K and V, heads, head size, float32
CHUNK_BYTES = UNIT_BYTES * CHUNK_TOKENS // BLOCK_TOKENS
MAX_TOKENS = 8
ENGINE_CHILD = "tests.e2e.engine_child"
CALL_S = 90.0
START_S = 400.0
LOGPROB_TOLERANCE = 2e-3
"""float32 throughout: batches of another shape differ by some 1e-5, KV of another token by 1e-1."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``logprobs``: of the likeliest tokens at each position. ``cached``: prompt tokens that were not recomputed.
    ``ended``: why, as the engine tells its user."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached: int
    ended: str

    @classmethod
    def from_json(cls, reply: dict[str, Any]) -> Answer:
        logprobs = tuple({int(token): value for token, value in at.items()} for at in reply["logprobs"])
        return cls(tuple(reply["tokens"]), logprobs, reply["cached"], reply["ended"])

    def distance(self, other: Answer) -> float:
        """The largest difference of a token's log-probability, over the positions up to the first other token.

        Of a token that only one of them lists it is at least what that token exceeds the other's last one by.
        """
        largest = 0.0
        for at, (mine, theirs) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            shared = (abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())
            only_mine = (mine[token] - min(theirs.values()) for token in mine.keys() - theirs.keys())
            only_theirs = (theirs[token] - min(mine.values()) for token in theirs.keys() - mine.keys())
            largest = max([largest, *shared, *only_mine, *only_theirs])
            if self.tokens[at] != other.tokens[at]:
                break
        return largest


def assert_same(got: Answer, expected: Answer) -> None:
    """Tokens and logprobs, whatever was cached."""
    assert got.tokens == expected.tokens
    assert got.distance(expected) < LOGPROB_TOLERANCE


def make_prompt(seed: int, length: int) -> list[int]:
    """``length`` tokens that look like nothing else."""
    chosen = random.Random(seed)
    return [chosen.randrange(5, VOCABULARY) for _ in range(length)]


def whole_chunks(tokens: int) -> int:
    """How many of ``tokens`` lie in whole chunks: what a pool can give back."""
    return tokens // CHUNK_TOKENS * CHUNK_TOKENS


def embedded(path: Path, **pool: Any) -> dict[str, Any]:
    """Connector configuration: a pool in the engine's process."""
    return {"pool": {"path": str(path), "size": "96MiB", "segment_size": "8MiB", **pool}}


def engine_options(model: Path, connector: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``. ``connector``: its extra configuration; None: no connector at all.

    The default ``lookup_deadline_ms`` and the estimate of what is worth loading depend on how busy the machine is;
    here every hit shall be seen.
    """
    transfer = options.pop("transfer", {})
    if connector is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "MeshFusionConnector",
            "kv_connector_module_path": "meshfusion.host.connector.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "chunk_min_bytes": CHUNK_BYTES,
                "load_always": True,
                "lookup_deadline_ms": 5000,
                **connector,
            },
            **transfer,
        }
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **options,
    }


class EngineError(Exception):
    """The call failed inside the engine's process; the text is what a user would read."""


class EngineDied(Exception):
    """The engine's process ended, or overran its deadline, during a call."""


def _variables() -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # a compiler run of many seconds for one small function of the sampler
    }


@functools.cache
def _nursery() -> Nursery:
    return Nursery(_variables(), folder=ROOT)


def _process(module: str, environment: dict[str, str], channel: int, log: int) -> Process:
    """With a variable that is not ours, a Python of its own: it may count while vLLM is imported."""
    variables = {**_variables(), **environment}
    if all(name.startswith("MESHFUSION_") for name in environment):
        return _nursery().process(module, variables, channel=channel, log=log)
    return subprocess.Popen(
        [sys.executable, "-m", module, str(channel)],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(channel,),
    )


class EngineProcess:
    """One child process; see :mod:`tests.e2e.engine_child` for the calls."""

    def __init__(self, log: Path, *, environment: dict[str, str] | None = None, module: str = ENGINE_CHILD) -> None:
        ours, theirs = socket.socketpair()
        self.log = log
        with log.open("ab") as output:
            self.process = _process(module, environment or {}, theirs.fileno(), output.fileno())
        theirs.close()
        self._channel = ours
        self._received = b""

    def call(self, op: str, *, deadline_s: float = CALL_S, **arguments: Any) -> Any:
        """Raises :class:`EngineError` with the child's message."""
        self.send(op, deadline_s=deadline_s, **arguments)
        reply = self.receive(op, deadline_s=deadline_s + 5)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply["value"]

    def send(self, op: str, *, deadline_s: float = CALL_S, **arguments: Any) -> None:
        line = json.dumps({"op": op, "deadline_s": deadline_s, **arguments}) + "\n"
        try:
            self._channel.sendall(line.encode())
        except OSError as error:
            raise EngineDied(self._last_words(op)) from error

    def receive(self, op: str, *, deadline_s: float = CALL_S) -> dict[str, Any]:
        end_s = time.monotonic() + deadline_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._channel], [], [], max(0.0, end_s - time.monotonic()))
            piece = self._channel.recv(1 << 20) if ready else b""
            if not piece:
                raise EngineDied(self._last_words(op))
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self, op: str) -> str:
        tail = self.log.read_text(errors="replace")[-6000:]
        return f"no answer to {op!r}; exit status {self.process.poll()}; the end of {self.log}:\n{tail}"

    # ---- the calls that tests use most -----------------------------------------------------------------------------

    def start(self, model: Path, connector: dict[str, Any] | None, **options: Any) -> float:
        seconds: float = self.call("start", deadline_s=START_S, options=engine_options(model, connector, **options))
        return seconds

    def why_not(self, model: Path, connector: dict[str, Any], *, as_user: bool = False, **options: Any) -> str:
        """Why such an engine does not start; the process stays as it is."""
        arguments = engine_options(model, connector, **options)
        reason: str = self.call("why_not", deadline_s=START_S, options=arguments, as_user=as_user)
        return reason

    def generate(self, *prompts: Sequence[int], max_tokens: int = MAX_TOKENS, salt: str | None = None) -> list[Answer]:
        replies = self.call("generate", prompts=[list(prompt) for prompt in prompts], max_tokens=max_tokens, salt=salt)
        return [Answer.from_json(reply) for reply in replies]

    def answer(self, prompt: Sequence[int], *, max_tokens: int = MAX_TOKENS, salt: str | None = None) -> Answer:
        (answer,) = self.generate(prompt, max_tokens=max_tokens, salt=salt)
        return answer

    def add(self, request_id: str, prompt: Sequence[int], *, max_tokens: int = MAX_TOKENS) -> None:
        self.call("add", request_id=request_id, prompt=list(prompt), max_tokens=max_tokens)

    def finish(self) -> dict[str, Answer]:
        return {name: Answer.from_json(reply) for name, reply in self.call("finish").items()}

    def settle(self, **arguments: Any) -> dict[str, Any]:
        """Everything is given back, here and in the pool; the connector's counters and the pool's status."""
        held: dict[str, Any] = self.call("settle", **arguments)
        return held

    def close(self) -> None:
        """Stop the engine as a user does, then end the process."""
        self.call("stop", deadline_s=60.0)
        self._channel.close()
        assert self.process.wait(20.0) == 0, self._last_words("close")

    def kill(self) -> None:
        """SIGKILL; at any moment, any number of times."""
        self.process.kill()
        self.process.wait()
        self._channel.close()

    def words(self) -> str:
        """All that the process has printed."""
        return self.log.read_text(errors="replace")


class Engines:
    """Starts engine processes and kills those that are left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[EngineProcess] = []

    def process(self, *, module: str = ENGINE_CHILD, **environment: str) -> EngineProcess:
        """A process without an engine yet."""
        log = self._folder / f"engine-{len(self._processes)}.log"
        process = EngineProcess(log, environment=environment, module=module)
        self._processes.append(process)
        return process

    def start(
        self,
        model: Path,
        connector: dict[str, Any] | None,
        *,
        environment: dict[str, str] | None = None,
        module: str = ENGINE_CHILD,
        **options: Any,
    ) -> EngineProcess:
        process = self.process(module=module, **(environment or {}))
        process.start(model, connector, **options)
        return process

    def kill_all(self) -> None:
        for process in self._processes:
            process.kill()


@contextmanager
def engines_in(folder: Path) -> Iterator[Engines]:
    engines = Engines(folder)
    try:
        yield engines
    finally:
        engines.kill_all()


class Reference:
    """Right answers: from an engine that has never heard of the connector, each prompt from nothing."""

    def __init__(self, engines: Engines, model: Path) -> None:
        self._engines = engines
        self._model = model
        self._process: EngineProcess | None = None
        self._answers: dict[tuple[tuple[int, ...], int], Answer] = {}

    def answer(self, prompt: Sequence[int], *, max_tokens: int = MAX_TOKENS) -> Answer:
        asked = (tuple(prompt), max_tokens)
        if asked not in self._answers:
            if self._process is None:
                self._process = self._engines.start(self._model, None)
            assert self._process.call("reset")
            self._answers[asked] = self._process.answer(prompt, max_tokens=max_tokens)
            assert self._answers[asked].cached == 0
        return self._answers[asked]
