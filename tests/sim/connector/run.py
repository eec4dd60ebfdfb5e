"""Run it: ``python -m tests.sim.connector.run --seed 7``, or many seeds with ``--histories``."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tests.sim.connector.blocks import Violation
from tests.sim.connector.world import World

STEPS_MAX = 16


class SimulationFailed(AssertionError):
    """Names the seed that brings the failure back."""


class _Watch(logging.Handler):
    """An error that the code logs is one that it would have to survive, and none is provoked."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            raise Violation(f"an error was logged: {self.format(record)}")


@contextmanager
def watched() -> Iterator[None]:
    """Warnings are to be expected here."""
    logger = logging.getLogger("meshfusion")
    watch, level = _Watch(), logger.level
    logger.addHandler(watch)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(watch)
        logger.setLevel(level)


def run(seed: int) -> Counter[str]:
    """One history from ``seed``. Returns what happened how often; raises :class:`SimulationFailed`."""
    done = 0
    try:
        world = World(seed)
        for done in range(world.rng.randrange(4, STEPS_MAX)):  # noqa: B007
            world.step()
        ending = world.rng.random()
        if ending < 0.05:
            world.die()
        else:
            world.wind_down()
            if ending < 0.4:
                world.probe()
    except (AssertionError, Violation) as error:  # an assertion of the code itself, or a rule of ours
        raise SimulationFailed(
            f"seed {seed}, step {done}: {error}\nagain: python -m tests.sim.connector.run --seed {seed}"
        ) from error
    return world.seen


def run_many(first_seed: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    with watched():
        for seed in range(first_seed, first_seed + count):
            for name, times in run(seed).items():
                seen[name] += times
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--histories", type=int, default=1, help="how many seeds, from --seed on")
    options = parser.parse_args()
    began_s = time.monotonic()
    seen = run_many(options.seed, options.histories)
    for name, count in sorted(seen.items()):
        print(f"{count:>10}  {name}")
    print(f"{options.histories} histories in {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()

__all__ = ["SimulationFailed", "run", "run_many"]
