"""Random requests at engines that share a pool, compared with an engine that has none.

``python -m tests.e2e.hybrid_random MODEL SEED ROUNDS [OPTION=JSON...]`` drives until something is wrong; the options
are for ``vllm.LLM``.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.daemon import Daemon
from tests.e2e.harness import ROOT, Answer, EngineProcess, Engines, engines_in, make_prompt
from tests.e2e.hybrid_models import HYBRID_MODELS, HybridModel, make_hybrid_models

LONGEST_PROMPT = 480
CHUNK_MIN_BYTES = 4096  # chunks as short as the model allows


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what it asks for, and under which salt."""

    prompt: tuple[int, ...]
    max_tokens: int
    salt: str | None = None


class Prompts:
    """Prompts that share prefixes of each other, many of which end at a boundary or next to one."""

    def __init__(self, chosen: random.Random, step_tokens: int) -> None:
        self._chosen = chosen
        self._step_tokens = step_tokens
        self._known: list[tuple[int, ...]] = []
        self._seed = chosen.randrange(1 << 30)

    def learn(self, tokens: Sequence[int]) -> None:
        """A later prompt may go on where this one ended, as the turns of a conversation do."""
        self._known = [*self._known[-30:], tuple(tokens)]

    def next(self) -> tuple[int, ...]:
        self._seed += 1
        length, chosen = self._length(), self._chosen
        if not self._known or chosen.random() < 0.2:
            prompt = tuple(make_prompt(self._seed, length))
        else:
            known = chosen.choice(self._known)
            shared = known[: chosen.choice([len(known), self._length()])][:LONGEST_PROMPT]
            prompt = (*shared, *make_prompt(self._seed, max(0, length - len(shared))))
        self.learn(prompt)
        return prompt

    def _length(self) -> int:
        if self._chosen.random() < 0.3:
            return self._chosen.randint(1, LONGEST_PROMPT)
        steps = self._chosen.randint(1, LONGEST_PROMPT // self._step_tokens)
        return max(1, steps * self._step_tokens + self._chosen.choice([-1, 0, 1, 2]))


class Drive:
    """Two engines on one service, and a third without connector that knows the right answers.

    The engines stay usable between the rounds; what a round does is chosen by ``seed`` alone.
    """

    def __init__(self, model: HybridModel, folder: Path, engines: Engines, seed: int, **options: Any) -> None:
        weights = make_hybrid_models(ROOT / ".cache", [model.name])[model.name]
        self._tolerance = model.tolerance
        self._chosen = random.Random(seed)
        self._prompts = Prompts(self._chosen, math.lcm(*(group.block_tokens for group in model.groups)))
        self._right: dict[tuple[tuple[int, ...], int], Answer] = {}
        self.daemon = Daemon(folder, silence_s=20.0)
        self.daemon.start()

        def start(connector: dict[str, Any] | None, **more: Any) -> EngineProcess:
            environment = dict(model.environment)
            return engines.start(weights, connector, environment=environment, **{**model.options, **more})

        connector = {**self.daemon.connector, "chunk_min_bytes": CHUNK_MIN_BYTES}
        self._start = partial(start, connector, **options)
        self.engines = [self._start(), self._start()]
        self._reference = start(None)
        self.compared = 0
        self.cached = 0

    def round(self) -> None:
        """One thing that users do, at one engine or at both."""
        act = self._chosen.choice([self._ask, self._ask_both, self._ask_both, self._ask_in_trouble, self._interrupt])
        act()
        for engine in self.engines:
            if self._chosen.random() < 0.5:
                engine.settle(pool=False)
                assert engine.call("reset")

    def kill(self, *, service: bool = False) -> None:
        """Kill one engine, perhaps the service as well, while both engines save the same prompts; a fresh engine then
        answers them, as the other one does."""
        asked = self._some()
        doomed, other = self.engines
        for engine in self.engines:
            engine.call("medium", writes="slow", delay_s=0.05)
            self._send(engine, asked)
        time.sleep(self._chosen.uniform(0.1, 2.0))
        doomed.kill()
        if service:
            self.daemon.kill()
            self.daemon.start()
        self._compare(asked, self._received(other, asked))
        other.call("medium")
        self.engines = [other, self._start()]
        for engine in self.engines:
            self._send(engine, asked)
            self._compare(asked, self._received(engine, asked))

    def close(self) -> dict[str, int]:
        """Nothing is held any more; what the engines counted."""
        counts = [engine.settle(pool=False)["counts"] for engine in self.engines]
        self.daemon.wait_idle(holders=len(self.engines))
        for engine in (*self.engines, self._reference):
            engine.close()
        self.daemon.stop()
        return {name: sum(count.get(name, 0) for count in counts) for name in {*counts[0], *counts[1]}}

    def _ask(self) -> None:
        engine = self._chosen.choice(self.engines)
        asked = self._some()
        self._compare(asked, self._received(engine, self._send(engine, asked)))

    def _ask_in_trouble(self) -> None:
        """While its medium answers nothing: loads fail as a whole, or what is computed cannot be saved."""
        engine, asked = self._chosen.choice(self.engines), self._some()
        reads, writes = self._chosen.choice([("failing", ""), ("", "failing")])
        engine.call("medium", reads=reads, writes=writes)
        self._compare(asked, self._received(engine, self._send(engine, asked)))
        engine.settle(pool=False)
        engine.call("medium")

    def _ask_both(self) -> None:
        """The same prompts at once: one writes what the other reads, and both write the rest."""
        asked = self._some()
        orders = [self._chosen.sample(asked, len(asked)) for _ in self.engines]
        for engine, order in zip(self.engines, orders, strict=True):
            self._send(engine, order)
        for engine, order in zip(self.engines, orders, strict=True):
            self._compare(order, self._received(engine, order))

    def _interrupt(self) -> None:
        """Requests that are preempted while they run, with the cache emptied under them, or that are aborted."""
        engine, asked = self._chosen.choice(self.engines), self._some(salt=False)
        names = [f"{self.compared}-{at}" for at in range(len(asked))]
        for name, one in zip(names, asked, strict=True):
            engine.add(name, one.prompt, max_tokens=one.max_tokens)
            engine.call("step", count=self._chosen.randint(0, 3))
        for _ in range(self._chosen.randint(0, 3)):
            engine.call("step", count=self._chosen.randint(0, 12))
            if self._chosen.random() < 0.5:
                engine.call("abort", request_ids=[self._chosen.choice(names)])
            else:
                engine.call("preempt")
        answers = engine.finish()
        for name, one in zip(names, asked, strict=True):
            if name in answers:
                self._compare([one], [answers[name]])

    def _some(self, *, salt: bool = True) -> list[Asked]:
        salted = self._chosen.choice(["a", "b", None, None, None, None]) if salt else None
        count, lengths = self._chosen.randint(1, 4), [1, 2, 8, 40]
        return [Asked(self._prompts.next(), self._chosen.choice(lengths), salted) for _ in range(count)]

    def _send(self, engine: EngineProcess, asked: Sequence[Asked]) -> Sequence[Asked]:
        # One call has one length; each answer is compared as far as its own request goes.
        longest = max(one.max_tokens for one in asked)
        prompts = [list(one.prompt) for one in asked]
        engine.send("generate", prompts=prompts, max_tokens=longest, salt=asked[0].salt)
        return asked

    def _received(self, engine: EngineProcess, asked: Sequence[Asked]) -> list[Answer]:
        reply = engine.receive("generate")
        assert "error" not in reply, reply["error"]
        answers = [Answer.from_json(one) for one in reply["value"]]
        return [
            Answer(got.tokens[: one.max_tokens], got.logprobs[: one.max_tokens], got.cached, got.ended)
            for got, one in zip(answers, asked, strict=True)
        ]

    def _compare(self, asked: Sequence[Asked], answers: Sequence[Answer]) -> None:
        for one, got in zip(asked, answers, strict=True):
            right = self._answer(one)
            distance = got.distance(right)
            where = f"comparison {self.compared}: {len(one.prompt)} tokens, {got.cached} cached, salt {one.salt}"
            assert distance < self._tolerance, f"{where}: {distance}, {got.tokens} for {right.tokens}"
            self._prompts.learn((*one.prompt, *right.tokens))
            self.compared += 1
            self.cached += got.cached

    def _answer(self, one: Asked) -> Answer:
        asked = (one.prompt, one.max_tokens)
        if asked not in self._right:
            assert self._reference.call("reset")
            self._right[asked] = self._reference.answer(one.prompt, max_tokens=one.max_tokens)
            assert self._right[asked].cached == 0
        return self._right[asked]


def _main(name: str, seed: int, rounds: int, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch, engines_in(Path(scratch)) as engines:
        drive = Drive(HYBRID_MODELS[name], Path(scratch), engines, seed, **options)
        try:
            for number in range(rounds):
                drive.round()
                if number % 12 == 11:
                    drive.kill(service=number % 24 == 23)
                print(number, drive.compared, drive.cached, flush=True)
            print(json.dumps(drive.close()), flush=True)
        finally:
            drive.daemon.kill()


if __name__ == "__main__":
    _, model_name, seed_text, rounds_text, *given = sys.argv
    named = dict(option.split("=", 1) for option in given)
    values = {option: json.loads(value) for option, value in named.items()}
    _main(model_name, int(seed_text), int(rounds_text), **values)
