"""Runs in the guest, as ``python guest_flaky_paths.py CASE``: one of two soft-RoCE paths fails in one of many ways.

Reads and writes go on all the time. Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.host.path.flexpath.addresses import path_specs
from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.multipath import Multipath
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device
from meshfusion.tools.lab.guest_setup.links import RdmaPath, cut_path, restore_path, shape_path, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import Port, Subsystem, export, offer_steps, withdraw_steps
from meshfusion.tools.lab.guest_setup.shaping import Shaping
from meshfusion.tools.lab.guest_setup.steps import carry_out
from tests.lab.guest_flexpath import address_of
from tests.lab.guest_initiator import HOST, HOST_NQN, MIB, NQN, take_down, until
from tests.lab.mixed_load import DEVICE_MIB, LBA_BYTES, NSID, UNWRITTEN, MixedLoad, Place, stamp, wrong_blocks

BAD, GOOD = 0, 1  # paths
RATES_MBIT = (24.0, 16.0)  # in either direction; together half of what the guest's one processor moves
SHAPED = tuple(Shaping(rate_mbit=rate) for rate in RATES_MBIT)
TIMEOUT_S = 4.0
OUTAGE_TIMEOUT_S = 1.0
STORM_S = 90.0
ALONE_S, BEFORE_S, AGAIN_S = 2.0, 2.0, 2.0
# Rates are far below what the settings are made for, and so are the bytes that wait on a path; and no test should wait
# for the longest quarantine.
SETTINGS = SpreadSettings(min_outstanding_bytes=256 << 10, quarantine_max_s=2.0)
BACKOFF_MAX_S = 1.0
CONNECT_TIMEOUT_S = 3.0
Report = dict[str, object]


def opened(*paths: RdmaPath) -> Multipath:
    specs = path_specs(
        [address_of(path) for path in paths],
        NQN,
        HOST_NQN,
        HOST,
        io_queue_count=1,
        backoff_max_s=BACKOFF_MAX_S,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )
    return Multipath(specs, SETTINGS)


class Lab:
    """Two paths to one memory device, and the load that is on them."""

    def __init__(self) -> None:
        self.paths = soft_roce_paths(2)
        device = make_memory_device(MemoryDevice("mf0", DEVICE_MIB))
        device.write_bytes(stamp(0, DEVICE_MIB * MIB // LBA_BYTES, 0).tobytes())
        self.ports = [Port(number, path.target.address, (NQN,)) for number, path in enumerate(self.paths, start=1)]
        export([Subsystem(NQN, (device,))], self.ports)
        self.shape()
        self.places: Sequence[Place] = UNWRITTEN

    def shape(self) -> None:
        """As the paths are when they are good."""
        for path, shaping in zip(self.paths, SHAPED, strict=True):
            shape_path(path, shaping)

    @contextmanager
    def loaded(self, *paths: RdmaPath, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[MixedLoad, Multipath]]:
        initiator = opened(*paths)
        load = MixedLoad(initiator, self.places, timeout_s=timeout_s)
        load.start()
        time.sleep(0.5)
        try:
            yield load, initiator
        finally:
            load.stop()
            initiator.close(timeout_s=5.0)
        load.look_at_resting_memory()
        self.places = load.places()

    def alone(self) -> float:
        """What the good path does without the other one."""
        with self.loaded(self.paths[GOOD]) as (load, _):
            began_s = time.monotonic()
            time.sleep(ALONE_S)
            rate = load.mbit_per_s(began_s, time.monotonic())
        assert load.wrong_reads == load.touched == 0
        return rate

    def verify(self) -> dict[str, int]:
        """What lies on the medium, read over the good path."""
        restore_path(self.paths[GOOD])
        initiator = opened(self.paths[GOOD])
        medium = np.zeros(DEVICE_MIB * MIB, np.uint8)
        region = initiator.register_address(medium.ctypes.data, medium.nbytes, writable=True, owner=medium)
        for at in range(0, medium.nbytes, MIB):
            initiator.begin_read(NSID, at // LBA_BYTES, [region.part(at, MIB)], timeout_s=30.0).wait()
        initiator.close(timeout_s=5.0)
        return wrong_blocks(medium.view(np.uint64), self.places)


def state_of(initiator: Multipath, path: int) -> PathState:
    return initiator.reports()[path].state


Fault = Callable[[Lab, MixedLoad, Multipath], tuple[float, float]]


def observed(lab: Lab, fault: Fault) -> Report:
    """``fault`` makes one path bad and good again, and tells from when to when the other must be used to the full."""
    alone = lab.alone()
    with lab.loaded(*lab.paths) as (load, initiator):
        began_s = time.monotonic()
        time.sleep(BEFORE_S)
        before = load.mbit_per_s(began_s, time.monotonic())
        from_s, to_s = fault(lab, load, initiator)
        during = load.mbit_per_s(from_s, to_s)
        back_s = until(lambda: state_of(initiator, BAD) is PathState.LIVE)
        began_s = time.monotonic()
        time.sleep(AGAIN_S)
        again = load.mbit_per_s(began_s, time.monotonic())
    return {
        "alone_mbit_per_s": round(alone, 1),
        "before_of_alone": round(before / alone, 2),
        "during_of_alone": round(during / alone, 2),
        "back_s": round(back_s, 2),
        "again_of_before": round(again / before, 2),
        **load.evidence(),
        **lab.verify(),
    }


def outage(lab: Lab) -> Report:
    """First nothing passes on one path, then on neither: what is under way on the last one has its full deadline."""
    lab.shape()
    with lab.loaded(*lab.paths, timeout_s=OUTAGE_TIMEOUT_S) as (load, initiator):
        cut_path(lab.paths[GOOD])
        until(lambda: state_of(initiator, GOOD) is PathState.QUARANTINED)
        time.sleep(0.2)
        cut_path(lab.paths[BAD])
        time.sleep(2 * OUTAGE_TIMEOUT_S)
        lab.shape()
        back_s = until(lambda: all(state_of(initiator, path) is PathState.LIVE for path in (BAD, GOOD)))
    return {"back_s": round(back_s, 2), **load.evidence(), **lab.verify()}


def stall() -> Report:
    """Nothing passes and nobody is told, for three seconds. Then on both paths."""

    def fault(lab: Lab, load: MixedLoad, initiator: Multipath) -> tuple[float, float]:
        cut_path(lab.paths[BAD])
        cut_s = time.monotonic()
        time.sleep(3.0)
        restore_path(lab.paths[BAD], SHAPED[BAD])
        return cut_s + 1.0, cut_s + 3.0

    lab = Lab()
    return {**observed(lab, fault), "outage": outage(lab), "left": take_down()}


def kill() -> Report:
    """The target takes the subsystem from one port, which ends the queue pairs there, and offers it again."""

    def fault(lab: Lab, load: MixedLoad, initiator: Multipath) -> tuple[float, float]:
        began_s = time.monotonic()
        carry_out(withdraw_steps(lab.ports[BAD]))
        until(lambda: state_of(initiator, BAD) is PathState.QUARANTINED, timeout_s=TIMEOUT_S)
        time.sleep(max(0.0, began_s + 3.0 - time.monotonic()))
        carry_out(offer_steps(lab.ports[BAD]))
        return began_s + 1.0, began_s + 3.0

    return {**observed(Lab(), fault), "left": take_down()}


def flap() -> Report:
    """It goes and comes for twenty seconds, each time for another while."""

    def fault(lab: Lab, load: MixedLoad, initiator: Multipath) -> tuple[float, float]:
        began_s = time.monotonic()
        for away_s, there_s in ((1.0, 1.0), (0.3, 0.7), (1.5, 2.0), (0.5, 2.0), (2.0, 1.0), (0.2, 1.3), (1.5, 1.0)):
            cut_path(lab.paths[BAD])
            time.sleep(away_s)
            restore_path(lab.paths[BAD], SHAPED[BAD])
            time.sleep(there_s)
        cut_path(lab.paths[BAD])
        time.sleep(max(0.0, began_s + 20.0 - time.monotonic()))
        restore_path(lab.paths[BAD], SHAPED[BAD])
        return began_s + 1.0, time.monotonic()

    return {**observed(Lab(), fault), "left": take_down()}


def lossy() -> Report:
    """First one of two hundred packets vanishes, then three of a hundred; soft-RoCE sends them again, late."""

    def fault(lab: Lab, load: MixedLoad, initiator: Multipath) -> tuple[float, float]:
        began_s = time.monotonic()
        for loss_percent in (0.5, 3.0):
            shape_path(lab.paths[BAD], Shaping(rate_mbit=RATES_MBIT[BAD], loss_percent=loss_percent))
            time.sleep(4.0)
        shape_path(lab.paths[BAD], SHAPED[BAD])
        return began_s + 1.0, began_s + 8.0

    return {**observed(Lab(), fault), "left": take_down()}


def storm() -> Report:
    """Anything on either path, also on both, for a minute and a half; what is drawn differs each time."""
    lab, seed = Lab(), random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    with lab.loaded(*lab.paths) as (load, initiator):
        end_s = time.monotonic() + STORM_S
        while time.monotonic() < end_s:
            path = rng.choice((BAD, GOOD))
            match rng.choice(("cut", "cut", "kill", "loss")):
                case "cut":
                    cut_path(lab.paths[path])
                    time.sleep(rng.uniform(0.0, 3.0))
                case "kill":
                    carry_out(withdraw_steps(lab.ports[path]))
                    time.sleep(rng.uniform(0.0, 3.0))
                    carry_out(offer_steps(lab.ports[path]))
                case "loss":
                    shape_path(lab.paths[path], Shaping(RATES_MBIT[path], loss_percent=rng.choice((0.3, 1.0, 5.0))))
                    time.sleep(rng.uniform(0.5, 4.0))
            if rng.random() < 0.8:  # else the next fault meets this one
                lab.shape()
                time.sleep(rng.uniform(0.0, 3.0))
        lab.shape()
        time.sleep(1.0)  # what was just cut may not be known to be
        back_s = until(lambda: all(state_of(initiator, path) is PathState.LIVE for path in (BAD, GOOD)))
    evidence = {"seed": seed, "back_s": round(back_s, 2), **load.evidence(), **lab.verify()}
    return {**evidence, "left": take_down()}


CASES = (stall, kill, flap, lossy, storm)

if __name__ == "__main__":
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
