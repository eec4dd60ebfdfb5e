"""FlexPath over real initiators, in real time: two connections to one simulated subsystem, one of which goes away."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.link import OnEvent, PathSpec
from meshfusion.host.path.flexpath.multipath import Multipath
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.jbof.nvme.pending import FateUnknownError
from meshfusion.jbof.nvme.settings import ControllerSettings
from tests.host.support.waiting import until
from tests.jbof.nvme.sim.live import LiveTransport
from tests.jbof.nvme.sim.subsystem import INACCESSIBLE, LBA_BYTES, OPTIMIZED, SUBSYSTEM_NQN, SimNamespace, Subsystem
from tests.jbof.nvme.sim.target_admin import ANA

NSID = 1
BLOCKS = 16
SETTINGS = ControllerSettings(
    SUBSYSTEM_NQN,
    "nqn.2026-01.com.example:host",
    uuid.UUID(int=7),
    "test",
    io_queue_count=2,
    io_queue_depth=16,
    backoff_first_s=0.05,
    loss_timeout_s=1e6,
)


class Rig:
    """Each path has a target of its own process, as it were; the medium is the same."""

    def __init__(self) -> None:
        self.namespace = SimNamespace(NSID, 4096)
        self.transports: dict[int, LiveTransport] = {}
        self.initiators: dict[int, Initiator] = {}
        specs = [PathSpec(f"p{number}", self._opener(number)) for number in range(2)]
        self.paths = Multipath(
            specs, SpreadSettings(quarantine_s=0.2, patience_s=0.3, reentry_step_s=0.05, probe_s=0.1)
        )
        self.array = np.random.default_rng(1).integers(0, 256, BLOCKS * LBA_BYTES, np.uint8)
        self.region = self.paths.register_address(
            self.array.ctypes.data, self.array.nbytes, writable=True, owner=self.array
        )

    def _opener(self, number: int) -> Callable[[OnEvent], Initiator]:
        def open_path(on_event: OnEvent) -> Initiator:
            namespace = SimNamespace(NSID, 4096, durable=self.namespace.durable, cache=self.namespace.cache)
            subsystem = Subsystem({NSID: namespace}, mdts=1, descriptors=1, max_commands=0, has_limits=True)
            self.transports[number] = LiveTransport(subsystem)
            self.initiators[number] = Initiator(self.transports[number], SETTINGS, 5.0, on_event=on_event)
            return self.initiators[number]

        return open_path

    def do(self, number: int, action: Callable[[], object]) -> None:
        """On the thread of the path's initiator, which its target shares."""
        done = threading.Event()

        def call(_: float) -> list[Any]:
            action()
            done.set()
            return []

        self.initiators[number]._poller.call(call)
        assert done.wait(5.0)

    def silence(self, number: int, seconds: float) -> None:
        transport = self.transports[number]
        self.do(number, lambda: setattr(transport.target, "silent_until_s", transport.clock.now_s + seconds))

    def set_access(self, number: int, state: int) -> None:
        target = self.transports[number].target

        def change() -> None:
            target.subsystem.namespaces[NSID].ana_state = state
            target.changed(ANA)

        self.do(number, change)

    def write_all(self) -> None:
        pending = [
            self.paths.begin_write(NSID, i, [self.region.part(i * LBA_BYTES, LBA_BYTES)], timeout_s=5)
            for i in range(BLOCKS)
        ]
        for transfer in pending:
            transfer.wait()

    def read_all(self, timeout_s: float = 5.0) -> None:
        """In commands of one block, and every byte is looked at."""
        expected = self.array.copy()
        self.array[:] = 0
        pending = [
            self.paths.begin_read(NSID, i, [self.region.part(i * LBA_BYTES, LBA_BYTES)], timeout_s=timeout_s)
            for i in range(BLOCKS)
        ]
        for transfer in pending:
            transfer.wait()
        assert (self.array == expected).all()

    def state(self, number: int) -> PathState:
        return self.paths._spread.lanes[number].health.state

    def wait_until_reached(self, number: int, is_reached: bool) -> None:
        lane = self.paths._spread.lanes[number]
        until(lambda: lane.reaches(time.monotonic(), NSID) is is_reached or None, what="for the event")

    def wait_for(self, number: int, state: PathState) -> None:
        def is_so() -> bool | None:
            self.read_all()  # a path that comes back has to show that it works
            return self.state(number) is state or None

        until(is_so, what=f"for path {number} to be {state.value}")


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
    made = Rig()
    try:
        yield made
    finally:
        made.paths.close(timeout_s=2.0)


def test_written_data_is_read_back_and_durable() -> None:
    with rig() as r:
        r.write_all()
        r.read_all()
        r.paths.flush(NSID, timeout_s=5)
        assert len(r.namespace.durable) == BLOCKS
        assert not r.namespace.cache


@pytest.mark.parametrize("number", [0, 1])
def test_reads_survive_a_path_that_falls_silent(number: int) -> None:
    """No reset tells of it: the reads' patience does, their queue pairs are killed, and the other path has them."""
    with rig() as r:
        r.write_all()
        r.read_all()
        r.silence(number, 1.5)
        end_s = time.monotonic() + 1.4
        while not r.paths._spread.lanes[number].health.strikes:  # it is not in every turn's way, but it gets a probe
            began_s = time.monotonic()
            assert began_s < end_s, "the path was not found out"
            r.read_all()
            assert time.monotonic() - began_s < 1.0
        r.wait_for(number, PathState.LIVE)


def test_reads_survive_a_target_that_restarts() -> None:
    with rig() as r:
        r.write_all()
        r.paths.flush(NSID, timeout_s=5)
        r.do(0, lambda: r.transports[0].target.restart(0.2))
        r.read_all()
        r.wait_for(0, PathState.LIVE)


def test_a_write_over_a_path_that_falls_silent_is_in_doubt() -> None:
    with rig() as r:
        r.write_all()
        r.read_all()
        for number in (0, 1):
            r.silence(number, 1.0)
        pending = r.paths.begin_write(NSID, 0, [r.region.part(0, LBA_BYTES)], timeout_s=0.3)
        with pytest.raises(FateUnknownError):
            pending.wait()
        assert pending.wait_memory_free(5.0)


def test_access_is_taken_from_the_targets() -> None:
    with rig() as r:
        r.write_all()
        for state, is_reached in ((INACCESSIBLE, False), (OPTIMIZED, True)):
            r.set_access(0, state)
            r.wait_until_reached(0, is_reached)
            r.read_all()
