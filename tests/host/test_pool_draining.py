"""An engine whose service drains: it ends what it has open, asks for nothing new, and comes back (rule 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.host.pool_events import NOTHING_STORED, Attached, Committed, ReserveFailed
from meshfusion.jbof.errors import ServiceDrainingError
from tests.host.support.chunk_records import number_key
from tests.host.support.controlled_service import ControlledService, unavailable
from tests.host.support.pool_client_rig import UNITS, Rig, attached, granted, keys, reserve, wish
from tests.host.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick_reattach")


def draining() -> ServiceDrainingError:
    return ServiceDrainingError("the chunk service drains", next_step="try again")


def learns_by_a_refusal(service: ControlledService, rig: Rig) -> None:
    service.fails |= {"reserve": draining(), "attach": draining()}
    assert reserve(rig, wish(8)) == [ReserveFailed(8)]


def learns_by_a_heartbeat(service: ControlledService, rig: Rig) -> None:
    heard = service.heartbeat

    def heartbeat(request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        return replace(heard(request, deadline_s=deadline_s), is_draining=True)

    service.heartbeat = heartbeat  # type: ignore[method-assign]
    until(lambda: rig.client._standing.asking is None)


@pytest.mark.parametrize("learns", [learns_by_a_refusal, learns_by_a_heartbeat])
def test_what_is_open_ends_and_nothing_new_begins(
    service: ControlledService, learns: Callable[[ControlledService, Rig], None]
) -> None:
    service.heartbeat_s = 0.02
    with attached(service) as rig:
        lease_id = rig.match(keys(2)).lease_id
        place = granted(reserve(rig, wish(2))[0])
        learns(service, rig)
        asked = {name: len(service.calls[name]) for name in ("match", "reserve", "attach")}

        assert rig.match(keys(2), attempt=2).stored == NOTHING_STORED
        assert reserve(rig, wish(3)) == [ReserveFailed(3)]
        rig.client.settle(place, ((UNITS,),))
        assert rig.expect(Committed) == Committed((number_key(2),), ())
        assert lease_id in service.leases
        rig.client.release((lease_id,))
        until(lambda: not service.leases)
        beats = len(service.calls["heartbeat"])
        until(lambda: len(service.calls["heartbeat"]) > beats + 2, what="for heartbeats to go on")
        assert {name: len(service.calls[name]) for name in asked} == asked
        assert rig.client.attachment == rig.attachment
        rig.client.take_events()


def test_it_attaches_again_when_the_next_life_answers(service: ControlledService) -> None:
    service.heartbeat_s = 0.02
    with attached(service) as rig:
        learns_by_a_refusal(service, rig)
        service.fails = dict.fromkeys(("attach", "heartbeat"), unavailable())
        until(lambda: rig.client.attachment is None)
        service.restart()
        service.fails = {"attach": draining()}  # one that is told to stop as soon as it began
        tried = len(service.calls["attach"])
        until(lambda: len(service.calls["attach"]) > tried + 2)
        assert rig.match(keys(2)).stored == NOTHING_STORED
        service.fails.clear()
        again = rig.expect(Attached).attachment
        assert again.epoch == 2
        assert rig.match(keys(2), attempt=2).stored.chunk_count == 2
        assert granted(reserve(rig, wish(4))[0])


def test_an_answer_to_an_earlier_incarnation_says_nothing_about_the_current_one(service: ControlledService) -> None:
    with attached(service) as rig:
        former = rig.attachment.holder_id
        rig.client.attach_anew(former)
        rig.expect(Attached)

        def refuse() -> None:
            raise draining()

        assert rig.client._standing.ask("commit", former, refuse) is None
        assert rig.match(keys(2)).stored.chunk_count == 2
