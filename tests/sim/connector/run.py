"""Run it: ``python -m tests.sim.connector.run --seed 7``, or many seeds with ``--histories``."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from meshfusion.host.connector.vllm import chunking
from tests.sim.arguments import at_least
from tests.sim.connector.blocks import Violation
from tests.sim.connector.world import World

SHORT_STEPS, LONG_STEPS = (2, 6), (7, 30)  # of a history; a step is about six events
LONG_SHARE = 0.05
BATCH = 2000  # histories that one process runs on end


class SimulationFailed(AssertionError):
    """Names the seed that brings the failure back."""


class _Watch(logging.Handler):
    """An error that the code logs is one that it would have to survive, and none is provoked."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            raise Violation(f"an error was logged: {self.format(record)}")


@contextmanager
def watched() -> Iterator[None]:
    """Warnings are to be expected here. When this process began is of no interest to any history and takes reading."""
    logger = logging.getLogger("meshfusion")
    watch, level = _Watch(), logger.level
    logger.addHandler(watch)
    logger.setLevel(logging.ERROR)
    try:
        with patch.object(chunking, "process_started_ns", lambda: 0):
            yield
    finally:
        logger.removeHandler(watch)
        logger.setLevel(level)


def live(rng: random.Random) -> Counter[str]:
    """One history. Returns what happened how often; raises :class:`Violation`, or an assertion of the code itself."""
    world = World(rng)
    for _ in range(rng.randint(*(LONG_STEPS if rng.random() < LONG_SHARE else SHORT_STEPS))):
        world.step()
    ending = rng.random()
    if ending < 0.05:
        world.die()
    else:
        world.wind_down()
        if ending < 0.15:
            world.probe()
    return world.seen + Counter({f"counted {name}": count for name, count in world.side.counts().items()})


def run(seed: int) -> Counter[str]:
    """The history of ``seed``; raises :class:`SimulationFailed`."""
    try:
        return live(random.Random(seed))
    except (Exception, Violation) as error:  # whatever it is, the seed brings it back
        raise SimulationFailed(
            f"seed {seed}: {error!r}\nagain: python -m tests.sim.connector.run --seed {seed}"
        ) from error


def run_many(first_seed: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    with watched():
        for seed in range(first_seed, first_seed + count):
            for name, times in run(seed).items():
                seen[name] += times
    return seen


def run_at_once(first_seed: int, count: int) -> Counter[str]:
    """The same on all processors. They are forked: to import the engine anew would take longer than the histories."""
    batches = range(first_seed, first_seed + count, BATCH)
    ends = [*batches, first_seed + count][1:]
    seen: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool() as processes:
        for part in processes.starmap(run_many, [(a, b - a) for a, b in zip(batches, ends, strict=True)], chunksize=1):
            seen.update(part)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the first history")
    parser.add_argument("--histories", type=at_least(1), default=1, help="how many seeds, from --seed on")
    options = parser.parse_args()
    began_s = time.monotonic()
    run_all = run_at_once if options.histories > BATCH else run_many
    seen = run_all(options.seed, options.histories)
    for name, count in sorted(seen.items()):
        print(f"{count:>10}  {name}")
    print(f"{options.histories} histories in {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()

__all__ = ["SimulationFailed", "live", "run", "run_at_once", "run_many", "watched"]
