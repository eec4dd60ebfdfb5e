"""The initiator's calls, with threads and in real time, against the simulated target."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.controller_effects import (
    ConnectionLost,
    ControllerEvent,
    ControllerState,
    InventoryChanged,
    RetryScheduled,
)
from meshfusion.jbof.nvme.fields import NvmeFieldError
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.jbof.nvme.io_commands import LbaRange
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.memory import MemoryInUseError
from meshfusion.jbof.nvme.pending import FateUnknownError
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.status import NvmeCommandError
from meshfusion.jbof.nvme.transfer_effects import PathUnusableError
from meshfusion.jbof.nvme.transfer_requests import Flush
from tests.jbof.nvme.sim.live import LiveTransport
from tests.jbof.nvme.sim.subsystem import INACCESSIBLE, LBA_BYTES, OPTIMIZED, SUBSYSTEM_NQN, SimNamespace, Subsystem
from tests.jbof.nvme.sim.target_admin import ANA, NAMESPACES

SETTINGS = ControllerSettings(
    SUBSYSTEM_NQN, "nqn.2026-01.com.example:host", uuid.UUID(int=7), "test", io_queue_count=2, io_queue_depth=16
)
RNG = np.random.default_rng(5)


def subsystem() -> Subsystem:
    namespaces = {nsid: SimNamespace(nsid, 4096) for nsid in (1, 3)}
    return Subsystem(namespaces, mdts=1, descriptors=1, max_commands=0, has_limits=True)


def data(blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return RNG.integers(0, 256, blocks * LBA_BYTES, dtype=np.uint8)


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.002)


class Bench:
    """An initiator and the target that it is connected to. Touch the target with ``do``, on the poller's thread."""

    def __init__(self, **settings: Any) -> None:
        self.events: list[ControllerEvent] = []
        self.transport = LiveTransport(subsystem())
        self.target = self.transport.target
        wanted = replace(SETTINGS, **settings)
        self.initiator = Initiator(self.transport, wanted, 5.0, on_event=self.events.append)

    def do(self, action: Callable[[], object]) -> None:
        done = threading.Event()

        def call(_: float) -> list[Any]:
            action()
            done.set()
            return []

        self.initiator._poller.call(call)
        assert done.wait(5.0)

    def saw(self, kind: type) -> bool:
        return any(isinstance(event, kind) for event in self.events)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.initiator.close()
    assert made.transport.is_closed


def test_written_data_is_read_back(bench: Bench) -> None:
    initiator = bench.initiator
    source, sink = data(100), np.zeros(100 * LBA_BYTES, np.uint8)
    out, back = initiator.register(source), initiator.register(sink)
    initiator.write(3, 7, [out.all()], force_unit_access=True)
    # In pieces that the blocks' boundaries meet, as a target with one descriptor needs it.
    initiator.read(3, 7, [back.part(0, 512 * 3), back.part(512 * 3, 512 * 97)])
    assert (sink == source).all()
    assert bench.target.subsystem.namespaces[3].durable[7] == source[:512].tobytes()
    out.close()
    back.close()
    assert len(bench.transport.memory.regions) == 2  # the scratch memory's


@pytest.mark.parametrize("key_scope", list(KeyScope))
def test_chunks_are_placed_apart_where_the_namespace_can(key_scope: KeyScope) -> None:
    transport = LiveTransport(replace(subsystem(), placement_ids=(0x100, 0x105)))
    initiator = Initiator(transport, replace(SETTINGS, key_scope=key_scope), 5.0)
    source = data(8)
    out = initiator.register(source)
    initiator.write(3, 0, [out.all()], force_unit_access=True)
    initiator.write(1, 0, [out.all()])
    assert transport.target.seen[f"writes to placement {0x105}"] == 2
    assert transport.target.seen["writes to placement None"] == 0
    out.close()
    initiator.close()


def test_keys_for_each_command() -> None:
    """The simulated target looks at every window; see also the simulation. A command has one piece of memory then."""
    transport = LiveTransport(replace(subsystem(), descriptors=4))
    initiator = Initiator(transport, replace(SETTINGS, key_scope=KeyScope.COMMAND), 5.0)
    assert initiator.max_descriptors == 1
    source, sink = data(100), np.zeros(100 * LBA_BYTES, np.uint8)
    out, back = initiator.register(source), initiator.register(sink)
    for lba in (7, 200):
        initiator.write(3, lba, [out.all()])
        initiator.read(3, lba, [back.part(0, 512 * 3), back.part(512 * 3, 512 * 97)])
        assert (sink == source).all()
        sink[:] = 0
    initiator.deallocate(3, [LbaRange(7, 8)])
    assert transport.target.seen["keys invalidated by the target"] > 0
    out.close()
    back.close()
    initiator.close()


def test_durability_and_deallocation(bench: Bench) -> None:
    initiator, namespace = bench.initiator, bench.target.subsystem.namespaces[1]
    region = initiator.register(data(16))
    initiator.write(1, 0, [region.all()])
    assert namespace.durable == {}
    initiator.flush(1)
    assert len(namespace.durable) == 16
    initiator.deallocate(1, [LbaRange(0, 10), LbaRange(12, 2)])
    zero = bytes(LBA_BYTES)
    assert [i for i in range(16) if namespace.durable[i] == zero] == [*range(10), 12, 13]


def test_many_at_a_time(bench: Bench) -> None:
    initiator = bench.initiator
    source = data(256)
    region = initiator.register(source)
    sink = np.zeros_like(source)
    back = initiator.register(sink)
    size = 8 * LBA_BYTES
    writes = [initiator.begin_write(1, 8 * i, [region.part(i * size, size)]) for i in range(32)]
    for write in writes:
        write.wait()
    reads = [initiator.begin_read(1, 8 * i, [back.part(i * size, size)]) for i in range(32)]
    for read in reads:
        read.wait()
    assert (sink == source).all()


def test_several_threads_at_a_time(bench: Bench) -> None:
    """They post and drive in turn, unlike the main thread, which leaves that to the poller's."""
    initiator, size = bench.initiator, 16 * LBA_BYTES

    def write_and_read(index: int) -> bool:
        source, sink = data(16), np.zeros(size, np.uint8)
        out, back = initiator.register(source), initiator.register(sink)
        for round_ in range(10):
            source[0] = round_
            writes = [
                initiator.begin_write(1, 100 * index + 4 * i, [out.part(i * size // 4, size // 4)]) for i in range(4)
            ]
            for write in writes:
                write.wait()
            initiator.read(1, 100 * index, [back.all()])
            if not (sink == source).all():
                return False
        out.close()
        back.close()
        return True

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(write_and_read, range(4))) == [True] * 4


def test_a_bug_on_a_thread_that_waits_ends_it_for_all() -> None:
    bench = Bench()
    region = bench.initiator.register(data(4))
    bench.do(lambda: setattr(bench.target, "silent_until_s", bench.transport.clock.now_s + 60))

    def bug(_: float) -> list[Any]:
        raise ZeroDivisionError

    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(bench.initiator.write, 1, 0, [region.all()], timeout_s=30)
        until(lambda: bench.initiator._poller._is_led)
        bench.initiator._poller.call(bug)
        with pytest.raises(FateUnknownError, match="ended by a bug: ZeroDivisionError") as caught:
            written.result()
    assert caught.value.transfer.wait_memory_free(5.0)
    assert bench.transport.is_idle
    bench.initiator.close()
    assert region.use_count == 0


def test_what_the_controller_says_of_itself(bench: Bench) -> None:
    info = bench.initiator.info
    assert info is not None
    assert (info.io_queue_count, info.io_queue_depth, info.controller.mn) == (2, 16, "simulated")
    assert info.max_transfer_bytes == 8192
    assert sorted(bench.initiator.inventory.namespaces) == [1, 3]
    bench.target.subsystem.namespaces[2] = SimNamespace(2, 77)
    assert bench.initiator.identify().namespaces[2].info.nsze == 77


def test_changes_are_noticed(bench: Bench) -> None:
    namespaces = bench.target.subsystem.namespaces
    namespaces[5] = SimNamespace(5, 100)
    bench.do(lambda: bench.target.changed(NAMESPACES))
    until(lambda: 5 in bench.initiator.inventory.namespaces)
    assert [event.nsids for event in bench.events if isinstance(event, InventoryChanged)] == [{5}]
    namespaces[5].ana_state = INACCESSIBLE
    bench.do(lambda: bench.target.changed(ANA))
    until(lambda: bench.initiator.inventory.ana_state(5) == INACCESSIBLE)
    with pytest.raises(PathUnusableError, match="namespace 5 is inaccessible"):
        bench.initiator.flush(5)
    bench.initiator.flush(1)


def test_a_path_error_makes_it_look(bench: Bench) -> None:
    """The target tells nothing; the command's status does."""
    namespace = bench.target.subsystem.namespaces[1]
    namespace.ana_state = INACCESSIBLE
    pending = bench.initiator.begin(Flush(1), (), 5.0)
    with pytest.raises(NvmeCommandError, match="Inaccessible"):
        pending.wait()
    assert pending.is_retryable
    until(lambda: bench.initiator.inventory.ana_state(1) == INACCESSIBLE)
    namespace.ana_state = OPTIMIZED
    bench.do(lambda: bench.target.changed(ANA))
    until(lambda: bench.initiator.inventory.ana_state(1) == OPTIMIZED)
    bench.initiator.flush(1)


def test_errors_say_what_and_where(bench: Bench) -> None:
    initiator = bench.initiator
    region = initiator.register(data(3))
    with pytest.raises(MediaError, match="no namespace 2"):
        initiator.flush(2)
    with pytest.raises(NvmeFieldError, match="data length"):
        initiator.write(1, 0, [region.part(0, 700)])
    with pytest.raises(NvmeFieldError, match="number of ranges"):
        initiator.deallocate(1, [])
    with pytest.raises(NvmeCommandError, match="test, namespace 1: NVMe command Write"):
        initiator.write(1, 4095, [region.all()])
    assert region.use_count == 0


def test_memory_of_a_write_in_doubt_stays_taken_until_the_queue_is_dead() -> None:
    bench = Bench()
    initiator = bench.initiator
    region = initiator.register(data(4))
    latency_s = bench.transport.fabric.latency_s
    bench.do(lambda: setattr(bench.target, "silent_until_s", bench.transport.clock.now_s + 1.0))
    bench.transport.fabric.latency_s = lambda: 0.3  # type: ignore[method-assign]
    began_s = time.monotonic()
    with pytest.raises(FateUnknownError) as caught:
        initiator.write(1, 0, [region.all()], timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began_s < 0.4
    assert region.use_count == 1
    with pytest.raises(MemoryInUseError):
        region.close()
    assert not caught.value.transfer.wait_memory_free(0.05)
    assert caught.value.transfer.wait_memory_free(2.0)
    region.close()
    bench.transport.fabric.latency_s = latency_s  # type: ignore[method-assign]
    until(lambda: initiator.state is ControllerState.LIVE)
    initiator.flush(1)
    initiator.close()


def test_a_lost_target_is_found_again(bench: Bench) -> None:
    bench.do(lambda: bench.target.restart(0.2))
    until(lambda: bench.saw(ConnectionLost))
    with pytest.raises(MeshFusionError, match="not connected"):
        bench.initiator.flush(1)
    until(lambda: bench.initiator.state is ControllerState.LIVE)
    assert bench.saw(RetryScheduled)
    bench.initiator.flush(1)


def test_a_target_that_is_not_there_is_told_at_once() -> None:
    transport = LiveTransport(subsystem())
    transport.target.away_until_s = 1e9
    with pytest.raises(MediaError, match="refused"):
        Initiator(transport, SETTINGS, 5.0)
    assert transport.is_closed


def test_a_wrong_subsystem() -> None:
    transport = LiveTransport(subsystem())
    with pytest.raises(NvmeCommandError, match="Connect Invalid Parameters"):
        Initiator(transport, replace(SETTINGS, subsystem_nqn="nqn.2026-01.com.example:other"), 5.0)
    assert transport.is_closed


def test_closing_in_order_leaves_nothing_at_the_target() -> None:
    bench = Bench()
    bench.initiator.close()
    assert bench.initiator.state is ControllerState.CLOSED
    assert bench.transport.is_closed
    bench.initiator.close()  # again is no error
    with pytest.raises(MeshFusionError, match="not connected"):
        bench.initiator.flush(1)


def test_closing_with_something_under_way_does_not_hang() -> None:
    bench = Bench(shutdown_timeout_s=0.1)
    region = bench.initiator.register(data(4))
    bench.do(lambda: setattr(bench.target, "silent_until_s", bench.transport.clock.now_s + 60))
    pending = bench.initiator.begin_write(1, 0, [region.all()], timeout_s=30)
    began_s = time.monotonic()
    bench.initiator.close(timeout_s=0.5)
    assert time.monotonic() - began_s < 3
    with pytest.raises(FateUnknownError):
        pending.wait()
    assert pending.wait_memory_free(0)


def test_a_bug_leaves_nobody_waiting_and_no_queue_pair_alive(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    region = bench.initiator.register(data(4))
    bench.do(lambda: setattr(bench.target, "silent_until_s", bench.transport.clock.now_s + 60))
    pending = bench.initiator.begin_write(1, 0, [region.all()], timeout_s=30)
    until(lambda: region.use_count)

    def bug(_: float) -> list[Any]:
        raise ZeroDivisionError

    bench.initiator._poller.call(bug)
    with pytest.raises(FateUnknownError, match="ended by a bug: ZeroDivisionError"):
        pending.wait()
    assert pending.wait_memory_free(5.0)
    assert bench.transport.is_idle
    with pytest.raises(MediaError, match="ended by a bug"):
        bench.initiator.flush(1)
    bench.initiator.close()
    assert bench.transport.is_closed
    assert "the NVMe poller ended" in caplog.text
