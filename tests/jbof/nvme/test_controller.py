"""A controller's life, against the simulated target in its calm: upkeep, loss, reconnection, end."""

from __future__ import annotations

import math
from functools import partial

import pytest

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.association import MAX_CONVERSATIONS
from meshfusion.jbof.nvme.async_events import EventType
from meshfusion.jbof.nvme.controller_effects import (
    NEXT_STATES,
    ConnectionLost,
    ControllerLost,
    ControllerState,
    DeathOverdue,
    Disconnected,
    InventoryChanged,
    RequestEnded,
    RetryScheduled,
    TargetEvent,
)
from meshfusion.jbof.nvme.fields import NvmeProtocolError
from meshfusion.jbof.nvme.inventory import read_error_log
from meshfusion.jbof.nvme.procedures import Pause, Procedure
from meshfusion.jbof.nvme.queue_effects import CommandDeadlineError, QueueFullError
from meshfusion.jbof.nvme.reconnect import Reconnecting
from meshfusion.jbof.nvme.status import NvmeCommandError
from meshfusion.jbof.nvme.transfer_effects import TransferDone, TransferFailed, TransferInDoubt, TransferMemoryFree
from meshfusion.jbof.nvme.transfer_requests import Flush
from meshfusion.jbof.nvme.transport import LinkBroken
from tests.jbof.nvme.controller_bench import SETTINGS, TICK_S, Bench
from tests.jbof.nvme.sim.subsystem import CHANGE, OPTIMIZED
from tests.jbof.nvme.sim.target_admin import ANA, NAMESPACES

_S = ControllerState


# ---- upkeep ----------------------------------------------------------------------------------------------------------


def test_keep_alives_go_out_every_half_of_the_timeout() -> None:
    bench = Bench().connect()
    bench.run(10.0)
    assert bench.target.seen["keep-alives"] in (9, 10)
    [controller] = bench.target.controllers.values()
    assert controller.keep_alive_s == 2.0
    assert bench.state is _S.LIVE


def test_an_unanswered_keep_alive_loses_the_connection() -> None:
    bench = Bench().connect()
    silent_from_s = bench.clock.now_s
    bench.target.silent_until_s = 1e9
    bench.run_until(lambda: bench.seen(ConnectionLost))
    assert bench.times(ConnectionLost)[0] - silent_from_s <= 2.0 + 2 * TICK_S
    assert isinstance(bench.seen(ConnectionLost)[0].error, CommandDeadlineError)


def test_a_state_that_goes_on_changing_is_looked_at_again_without_an_event() -> None:
    bench = Bench().connect()
    namespace = bench.subsystem.namespaces[1]
    namespace.ana_state = CHANGE
    bench.target.changed(ANA)
    bench.run(0.2)
    assert bench.session.controller.ana_state(1) == CHANGE
    namespace.ana_state = OPTIMIZED
    bench.run(1.2)
    assert bench.session.controller.ana_state(1) == OPTIMIZED


def test_other_events_are_handed_on_and_error_events_read() -> None:
    bench = Bench().connect()
    bench.target.changed((0x0, 0x04, 0x01))
    bench.run(0.5)
    [event] = bench.seen(TargetEvent)
    assert event.event.type is EventType.ERROR


def test_a_procedure_of_the_owner() -> None:
    bench = Bench().connect()
    bench.act(bench.session.request(bench.clock.now_s, "me", read_error_log()))
    bench.run(0.1)
    assert bench.seen(RequestEnded) == [RequestEnded("me", bytes(64), None)]
    bench.act(bench.session.disconnect(bench.clock.now_s, orderly=False))
    bench.act(bench.session.request(bench.clock.now_s, "late", read_error_log()))
    assert bench.seen(RequestEnded)[1].error is not None


def test_requests_at_a_time_are_bounded() -> None:
    bench = Bench().connect()
    bench.target.silent_until_s = bench.clock.now_s + 0.3
    for number in range(20):
        bench.act(bench.session.request(bench.clock.now_s, number, read_error_log()))
    refused = [event for event in bench.seen(RequestEnded) if isinstance(event.error, QueueFullError)]
    assert len(refused) == 20 - MAX_CONVERSATIONS
    bench.run(0.5)
    assert len([event for event in bench.seen(RequestEnded) if event.error is None]) == MAX_CONVERSATIONS
    assert bench.admin.memory.in_use_count == 0


def test_a_log_that_makes_no_sense_ends_the_connection() -> None:
    """And whatever else is asked of the controller, with the same error."""
    bench = Bench().connect()
    bench.subsystem.ana_log = lambda: b"\xff" * 64  # type: ignore[method-assign]
    for number in range(3):
        bench.act(bench.session.request(bench.clock.now_s, number, pausing()))
    bench.target.changed(ANA)
    bench.run_until(lambda: bench.seen(ConnectionLost))
    [lost] = bench.seen(ConnectionLost)
    assert isinstance(lost.error, NvmeProtocolError)
    assert all(event.error is lost.error for event in bench.seen(RequestEnded))
    bench.run_until_state(_S.LOST)


def pausing() -> Procedure[None]:
    while True:
        yield Pause(TICK_S)


def test_blocks_in_use_are_no_change_of_a_namespace() -> None:
    bench = Bench().connect()
    original = bench.subsystem.identify_namespace

    def identify(nsid: int) -> bytes:
        data = bytearray(original(nsid))
        data[16:24] = (55).to_bytes(8, "little")  # NUSE (NVM Figure 114)
        return bytes(data)

    bench.subsystem.identify_namespace = identify  # type: ignore[method-assign]
    bench.target.changed(NAMESPACES)
    bench.run(0.5)
    assert bench.session.controller.inventory.namespaces[1].info.nuse == 55
    assert bench.seen(InventoryChanged) == []
    bench.subsystem.namespaces[1].lba_count = 200
    bench.target.changed(NAMESPACES)
    bench.run(0.5)
    assert [event.nsids for event in bench.seen(InventoryChanged)] == [{1}]


# ---- loss ------------------------------------------------------------------------------------------------------------


def test_it_reconnects_with_growing_pauses_and_gives_up() -> None:
    bench = Bench().connect()
    bench.target.restart(1e9)
    bench.target.refuses_while_away = True
    bench.run_until_state(_S.LOST)
    lost_s = bench.times(ConnectionLost)[0]
    pauses = [round(event.retry_s - now_s, 3) for now_s, event in bench.events if isinstance(event, RetryScheduled)]
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert bench.times(ControllerLost)[0] - lost_s == pytest.approx(SETTINGS.loss_timeout_s, abs=0.05)
    assert bench.fabric.links == {}


def test_the_jitter_shortens_a_pause_by_up_to_a_half() -> None:
    assert [Reconnecting(1.0, 8.0, 60.0, partial(float, j)).next_attempt_s(100.0) for j in (0.0, 0.5, 1.0)] == [
        101.0,
        100.75,
        100.5,
    ]


def test_a_host_refused_at_reconnection_is_tried_again() -> None:
    """A target that starts may not know its hosts yet."""
    bench = Bench().connect()
    bench.target.restart(0.0)
    bench.target.refuses = 0x4184
    bench.run(3.0)
    errors = [event.error for event in bench.seen(RetryScheduled)]
    assert any(isinstance(error, NvmeCommandError) for error in errors)
    bench.target.refuses = 0
    bench.run_until_state(_S.LIVE)


def test_what_can_never_work_is_not_tried_again() -> None:
    bench = Bench().connect()
    bench.target.connect_result = 1 << 17
    bench.target.restart(0.0)
    bench.run_until_state(_S.LOST)
    assert bench.clock.now_s < 2.0


def test_no_queue_pair_of_the_next_association_lives_with_one_of_the_last() -> None:
    bench = Bench().connect()
    old = set(bench.fabric.links)
    for link in bench.fabric.links.values():
        link.is_killed = True  # their deaths are not for the fabric to decide
    bench.fabric.carry_out = lambda effect: None  # type: ignore[method-assign]
    bench.act(
        bench.session.handle(bench.clock.now_s, LinkBroken(next(iter(old)), MediaError("broken", next_step="none")))
    )
    bench.run(5.0)
    assert bench.state is _S.LOSING
    assert len(bench.seen(DeathOverdue)) == len(old)
    assert bench.session.next_deadline_s == math.inf


def test_transfers_end_with_the_connection_and_their_memory_with_its_death() -> None:
    bench = Bench().connect()
    bench.target.silent_until_s = bench.clock.now_s + 0.5
    for owner in ("a", "b"):
        bench.act(bench.session.begin(bench.clock.now_s, owner, Flush(1), bench.clock.now_s + 0.2))
    bench.run(0.3)
    assert sorted(event.owner for event in bench.seen(TransferInDoubt)) == ["a", "b"]
    assert sorted(event.owner for event in bench.seen(TransferMemoryFree)) == ["a", "b"]
    assert bench.times(TransferInDoubt)[0] < bench.times(TransferMemoryFree)[0]
    bench.run_until_state(_S.LIVE)
    assert bench.admin.memory.in_use_count == 0


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_an_orderly_end_lets_commands_end() -> None:
    bench = Bench().connect()
    bench.act(bench.session.begin(bench.clock.now_s, "a", Flush(1), bench.clock.now_s + 5))
    bench.act(bench.session.disconnect(bench.clock.now_s, orderly=True))
    [controller] = bench.target.controllers.values()
    bench.act(bench.session.begin(bench.clock.now_s, "b", Flush(1), bench.clock.now_s + 5))
    bench.run_until_state(_S.CLOSED)
    assert [type(event) for event in bench.seen(TransferDone) + bench.seen(TransferFailed)] == [
        TransferDone,
        TransferFailed,
    ]
    assert controller.is_shut_down
    assert bench.seen(Disconnected) == [Disconnected(orderly=True)]
    assert bench.fabric.links == {}


def test_a_target_that_does_not_answer_cannot_delay_the_end_for_ever() -> None:
    bench = Bench(shutdown_timeout_s=0.5, keep_alive_timeout_s=60.0).connect()
    bench.target.silent_until_s = 1e9
    bench.act(bench.session.begin(bench.clock.now_s, "a", Flush(1), bench.clock.now_s + 50))
    began_s = bench.clock.now_s
    bench.act(bench.session.disconnect(began_s, orderly=True))
    bench.run_until_state(_S.CLOSED)
    assert bench.clock.now_s - began_s < 0.5 + SETTINGS.admin_timeout_s + 0.2
    assert bench.seen(Disconnected) == [Disconnected(orderly=False)]
    assert len(bench.seen(TransferInDoubt)) == len(bench.seen(TransferMemoryFree)) == 1


@pytest.mark.parametrize("orderly", [True, False])
def test_it_can_be_closed_in_every_state(orderly: bool) -> None:
    bench = Bench()
    bench.act(bench.session.disconnect(0.0, orderly=orderly))
    assert bench.state is _S.CLOSED

    for wanted in (_S.CONNECTING, _S.LIVE, _S.LOSING, _S.WAITING, _S.LOST):
        bench = Bench()
        bench.act(bench.session.connect(0.0))
        if wanted is not _S.CONNECTING:
            bench.run_until_state(_S.LIVE)
        if wanted not in (_S.CONNECTING, _S.LIVE):
            bench.target.restart(1e9)
            bench.run_until_state(wanted)
        bench.act(bench.session.disconnect(bench.clock.now_s, orderly=orderly))
        bench.run_until_state(_S.CLOSED)
        assert len(bench.seen(Disconnected)) == 1
        assert bench.fabric.links == {}
        assert bench.admin.memory.in_use_count == 0


def test_states_follow_each_other_as_the_table_says() -> None:
    bench = Bench()
    with pytest.raises(AssertionError):
        bench.session.controller._move(_S.LIVE)
    assert all(state is _S.CLOSED or following for state, following in NEXT_STATES.items())
