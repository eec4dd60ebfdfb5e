"""From the first connection to queues for I/O, against the simulated target in its calm; and the settings."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from meshfusion.jbof.errors import ConfigError, UnsupportedError
from meshfusion.jbof.nvme.controller_effects import (
    Connected,
    ControllerState,
)
from meshfusion.jbof.nvme.fields import NvmeProtocolError
from meshfusion.jbof.nvme.queue_effects import CommandDeadlineError
from meshfusion.jbof.nvme.status import NvmeCommandError
from tests.jbof.nvme.controller_bench import SETTINGS, Bench
from tests.jbof.nvme.sim.subsystem import Subsystem

_S = ControllerState


def patched(subsystem: Subsystem, offset: int, data: bytes) -> None:
    """Change what Identify Controller returns."""
    original = subsystem.identify_controller

    def identify(controller_id: int) -> bytes:
        found = bytearray(original(controller_id))
        found[offset : offset + len(data)] = data
        return bytes(found)

    subsystem.identify_controller = identify  # type: ignore[method-assign]


def test_it_comes_up_with_what_was_granted() -> None:
    bench = Bench(io_queue_count=9, io_queue_depth=1000).connect()
    assert bench.state is _S.LIVE
    [connected] = bench.seen(Connected)
    info = connected.info
    assert (info.io_queue_count, info.io_queue_depth) == (4, 128)  # the target grants 4; MQES is 127
    assert info.limits is None
    assert len(bench.session.controller.io_queues) == 4
    [controller] = bench.target.controllers.values()
    assert sorted(controller.links) == [0, 1, 2, 3, 4]
    assert controller.events_wanted == 1 << 8 | 1 << 11
    bench.run(0.2)
    assert len(controller.requests) == 3


def test_the_command_limit_bounds_the_depth() -> None:
    bench = Bench()
    bench.subsystem.max_commands = 20
    bench.connect()
    [connected] = bench.seen(Connected)
    assert connected.info.io_queue_depth == 20


@pytest.mark.parametrize(("after_s", "is_live"), [(1.8, True), (2.5, False)])
def test_ready_is_waited_for_as_long_as_cap_says(after_s: float, is_live: bool) -> None:
    """CAP.TO is 4 here, which is 2 seconds (Base Figure 36)."""
    bench = Bench(keep_alive_timeout_s=60.0)
    bench.target.never_ready = True

    def become_ready() -> None:
        bench.target.never_ready = False

    bench.clock.after(after_s, become_ready)
    bench.connect()
    assert (bench.state is _S.LIVE) is is_live
    if not is_live:
        assert "not ready (CSTS.RDY) 2 s after" in str(bench.error())


def test_a_controller_that_fails_instead_of_becoming_ready() -> None:
    bench = Bench()
    bench.target.fails = True
    assert "CSTS.CFS" in str(bench.connect().error())


@pytest.mark.parametrize("bit", [17, 18])
def test_what_a_host_without_a_key_cannot(bit: int) -> None:
    """Base Figure 549: ATR and ASCR. With a key: test_auth."""
    bench = Bench()
    bench.target.connect_result = 1 << bit
    assert isinstance(bench.connect().error(), UnsupportedError)


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (536, bytes(4), "no keyed SGLs"),
        (111, b"\x02", "not for I/O"),
        (320, bytes(2), "no keep-alive"),
    ],
)
def test_controllers_that_are_of_no_use(offset: int, data: bytes, words: str) -> None:
    bench = Bench()
    patched(bench.subsystem, offset, data)
    error = bench.connect().error()
    assert isinstance(error, UnsupportedError)
    assert words in str(error)


def test_two_names_for_one_controller() -> None:
    bench = Bench()
    patched(bench.subsystem, 78, struct.pack("<H", 999))
    assert isinstance(bench.connect().error(), NvmeProtocolError)


def test_a_target_without_an_nvm_command_set() -> None:
    bench = Bench()
    bench.subsystem.cap = lambda: 127 | 1 << 24 | 1 << 44  # type: ignore[method-assign]
    assert isinstance(bench.connect().error(), UnsupportedError)


def test_a_refused_host_is_told_at_once() -> None:
    """Connect Invalid Host, do not retry (Base Figure 105)."""
    bench = Bench()
    bench.target.refuses = 0x4184
    error = bench.connect().error()
    assert isinstance(error, NvmeCommandError)
    assert (error.status.sct, error.status.sc, error.status.dnr) == (1, 0x84, True)
    assert bench.fabric.links == {}


def test_no_answer_to_the_connection() -> None:
    bench = Bench()
    bench.target.silent_until_s = 1e9
    assert isinstance(bench.connect().error(), CommandDeadlineError)
    assert bench.clock.now_s < SETTINGS.connect_timeout_s + 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        {"io_queue_count": 0},
        {"admin_queue_depth": 4},
        {"io_queue_depth": 1},
        {"keep_alive_timeout_s": 0.0},
        {"loss_timeout_s": math.nan},
        {"host_nqn": "host"},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(SETTINGS, **wrong)


@pytest.mark.parametrize(
    ("ids", "known", "data"),
    [
        ((), {}, None),
        ((0,), {1: (0,)}, None),
        ((0, 1), {1: (0, 1)}, 1),
        ((0x100, 0x102, 0x101), {1: (0x100, 0x102, 0x101)}, 0x102),
    ],
)
def test_where_chunks_are_placed(ids: tuple[int, ...], known: dict[int, tuple[int, ...]], data: int | None) -> None:
    """With Flexible Data Placement, apart from what names no placement, which goes to the first."""
    bench = Bench()
    bench.subsystem.placement_ids = ids
    bench.connect()
    [connected] = bench.seen(Connected)
    assert dict(connected.info.placement_ids) == known
    assert connected.info.data_placement(1) == data
    assert connected.info.data_placement(2) is None


def test_a_namespace_where_placement_is_not_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.subsystem.placement_ids = (0, 1)
    monkeypatch.setattr(type(bench.target), "_placement_handles", lambda target, capsule: target.respond(capsule, 0x29))
    bench.connect()
    [connected] = bench.seen(Connected)
    assert connected.info.data_placement(1) is None
