"""Run it: ``python -m tests.sim.power.run --seed 7``, or many seeds with ``--histories``."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from tests.sim.power.drive import Faults
from tests.sim.power.recovery import SEGMENT_COUNTS
from tests.sim.power.world import Rules, World, step

STEPS = 150
NO_FAULTS = Faults()
ROT = Faults(lost=0.01, misdirected=0.01, rot=0.05)


class SimulationFailed(AssertionError):
    """Names the seed that brings the failure back."""


def run(
    seed: int,
    rules: Rules | None = None,
    *,
    faults: Faults = NO_FAULTS,
    steps: int = STEPS,
    drive_count: int = 1,
) -> Counter[str]:
    """The history of ``seed``; raises :class:`SimulationFailed`."""
    done = 0
    try:
        world = World(random.Random(seed), rules or Rules(), faults, drive_count)
        while done < steps:
            step(world)
            done += 1
    except Exception as error:  # whatever it is, the seed brings it back
        options = f"{' --rot' if faults != NO_FAULTS else ''}{f' --drives {drive_count}' if drive_count > 1 else ''}"
        raise SimulationFailed(
            f"seed {seed}, step {done}: {error!r}\nagain: python -m tests.sim.power.run --seed {seed}{options}"
        ) from error
    return world.seen + Counter({f"counted {name}": count for name, count in world.medium.counts.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--histories", type=int, default=1, help="how many seeds, from --seed on")
    parser.add_argument("--rot", action="store_true", help="on a drive that loses, misdirects and rots")
    parser.add_argument("--drives", type=int, choices=sorted(SEGMENT_COUNTS), default=1)
    options = parser.parse_args()
    began_s = time.monotonic()
    seen: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.histories):
        seen += run(seed, faults=ROT if options.rot else NO_FAULTS, drive_count=options.drives)
    for name, count in sorted(seen.items()):
        print(f"{count:>10}  {name}")
    print(f"{options.histories} histories in {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()

__all__ = ["NO_FAULTS", "ROT", "SimulationFailed", "run"]
