"""One RDMA connection over a stand-in for pyverbs: the order of things, and when a link may be called dead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme import rdma_link
from meshfusion.jbof.nvme.rdma_cm import NvmeConnectRejectedError, RejectReason
from meshfusion.jbof.nvme.rdma_events import CmEvent
from meshfusion.jbof.nvme.rdma_link import LinkState, RdmaLink
from meshfusion.jbof.nvme.rdma_queue_pair import Device
from meshfusion.jbof.nvme.transport import LinkBroken, LinkDead, LinkUp, OpenLink, PostCapsule, Received, Sent
from tests.jbof.nvme.fake_verbs import FakeCompletion, FakeVerbs, FakeVerbsError

DEPTH, CAPSULE_BYTES = 20, 320
PRIVATE, ACCEPTED = b"p" * 32, b"\0\0\x14\0"
FLUSHED = 5


class FakeChannel:
    """In place of :class:`~meshfusion.jbof.nvme.rdma_events.EventChannel`."""

    fd = 1234
    channel = "channel"

    def __init__(self, verbs: FakeVerbs) -> None:
        self._verbs = verbs

    def next_event(self) -> CmEvent | None:
        if not self._verbs.connection_events:
            return None
        kind, private_data = self._verbs.connection_events.popleft()
        return CmEvent(kind, f"event {kind}", private_data)

    def close(self) -> None:
        self._verbs.do("close channel")


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> FakeVerbs:
    monkeypatch.setattr(rdma_link, "EventChannel", FakeChannel)
    return FakeVerbs()


def new_link(verbs: FakeVerbs) -> RdmaLink:
    context = SimpleNamespace(name="rxe0")
    device = Device(verbs, "address", context, "pd", "target", CAPSULE_BYTES)  # type: ignore[arg-type]
    return RdmaLink(device, OpenLink(3, DEPTH, PRIVATE, 5.0))


def tell(link: RdmaLink, verbs: FakeVerbs, kind: int, private_data: bytes = b"") -> list[Any]:
    verbs.connection_events.append((kind, private_data))
    link.poll_connection()
    return link.poll(0.0, 16)


def live_link(verbs: FakeVerbs) -> RdmaLink:
    link = new_link(verbs)
    assert tell(link, verbs, verbs.RDMA_CM_EVENT_ADDR_RESOLVED) == []
    assert tell(link, verbs, verbs.RDMA_CM_EVENT_ROUTE_RESOLVED) == []
    assert tell(link, verbs, verbs.RDMA_CM_EVENT_CONNECT_RESPONSE, ACCEPTED) == [LinkUp(3, ACCEPTED)]
    return link


def test_receive_buffers_are_there_before_anything_can_come(verbs: FakeVerbs) -> None:
    live_link(verbs)
    assert verbs.log == [
        "resolve address",
        "resolve route",
        "create qp",
        "to INIT",
        *["receive"] * DEPTH,
        "connect",
        "to RTR",
        "to RTS",
        "establish",
    ]
    assert verbs.access_flags == 1 | 2 | 4, "targets could not read"
    assert verbs.parameters["private_data"] == PRIVATE
    assert verbs.parameters["data_len"] == len(PRIVATE)
    assert verbs.parameters["qp_num"] == 77
    assert verbs.parameters["resources"] > 0


def test_capsules_go_out_inline_where_they_fit(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    small, large = b"s" * 64, b"L" * 96
    link.post(PostCapsule(3, 500, small))
    link.post(PostCapsule(3, 501, large))
    assert verbs.sent == [(500, small, 2 | 8), (501, large, 2)]
    verbs.completions += [FakeCompletion(501), FakeCompletion(500)]
    assert link.poll(0.0, 16) == [Sent(3, 501), Sent(3, 500)]


def test_every_place_for_a_capsule_comes_back(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    for command_id in range(3 * DEPTH):
        link.post(PostCapsule(3, command_id, bytes(64)))
        verbs.completions.append(FakeCompletion(command_id))
        assert link.poll(0.0, 16) == [Sent(3, command_id)]


def test_responses_are_copied_and_their_buffers_posted_again(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    verbs.received = {1 << 32 | 4: b"four", 1 << 32 | 5: b"five"}
    verbs.completions.append(FakeCompletion(1 << 32 | 4, byte_len=16))
    verbs.completions.append(FakeCompletion(1 << 32 | 5, byte_len=4, wc_flags=8, imm_data=0xABCD))
    assert link.poll(0.0, 16) == [Received(3, b"four".ljust(16, b"\0"), None), Received(3, b"five", 0xABCD)]
    assert verbs.log[-2:] == ["receive", "receive"]


def test_a_rejection_keeps_its_reason(verbs: FakeVerbs) -> None:
    """RDMA Figure 7: record format 0, status 6."""
    link = new_link(verbs)
    tell(link, verbs, verbs.RDMA_CM_EVENT_ADDR_RESOLVED)
    tell(link, verbs, verbs.RDMA_CM_EVENT_ROUTE_RESOLVED)
    [broken] = tell(link, verbs, verbs.RDMA_CM_EVENT_REJECTED, b"\0\0\x06\0")
    assert isinstance(broken.error, NvmeConnectRejectedError)
    assert broken.error.reason is RejectReason.NO_RESOURCES


def test_a_disconnection_breaks_it_once(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    [broken] = tell(link, verbs, verbs.RDMA_CM_EVENT_DISCONNECTED)
    assert isinstance(broken, LinkBroken)
    assert tell(link, verbs, verbs.RDMA_CM_EVENT_DISCONNECTED) == []
    link.post(PostCapsule(3, 1, bytes(64)))
    assert verbs.sent == []


def test_a_failed_work_request_breaks_it(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    link.post(PostCapsule(3, 1, bytes(64)))
    verbs.completions.append(FakeCompletion(1, status=12))
    [broken] = link.poll(0.0, 16)
    assert isinstance(broken, LinkBroken)
    assert "status 12" in broken.error.message


@pytest.mark.parametrize("step", ["resolve address", "resolve route", "create qp", "to INIT", "connect", "to RTR"])
def test_whatever_fails_on_the_way_breaks_it_and_it_can_be_killed(verbs: FakeVerbs, step: str) -> None:
    verbs.fails.add(step)
    link = new_link(verbs)
    events = link.poll(0.0, 16)
    for kind in (
        verbs.RDMA_CM_EVENT_ADDR_RESOLVED,
        verbs.RDMA_CM_EVENT_ROUTE_RESOLVED,
        verbs.RDMA_CM_EVENT_CONNECT_RESPONSE,
    ):
        events += tell(link, verbs, kind, ACCEPTED)
    [broken] = events
    assert isinstance(broken, LinkBroken)
    assert isinstance(broken.error, MediaError)
    assert step in broken.error.message
    link.kill(1.0)
    assert link.poll(9.0, 16) == [LinkDead(3)]
    assert verbs.log.count("destroy qp") == verbs.log.count("create qp")


def test_another_device_than_the_memory_is_registered_with(verbs: FakeVerbs) -> None:
    link = new_link(verbs)
    tell(link, verbs, verbs.RDMA_CM_EVENT_ADDR_RESOLVED)
    verbs.dev_name = "rxe1"
    [broken] = tell(link, verbs, verbs.RDMA_CM_EVENT_ROUTE_RESOLVED)
    assert "rxe1" in broken.error.message


def test_dead_is_flushed_and_destroyed(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    link.post(PostCapsule(3, 9, bytes(64)))
    verbs.log.clear()
    link.kill(1.0)
    assert verbs.log == ["disconnect", "to ERR"]
    assert link.poll(1.0, 64) == []
    verbs.completions += [FakeCompletion(1 << 32 | slot, status=FLUSHED) for slot in range(DEPTH)]
    assert link.poll(1.1, 64) == [], "one is still to be flushed"
    verbs.completions.append(FakeCompletion(9, status=FLUSHED))
    assert link.poll(1.2, 64) == [LinkDead(3)]
    assert verbs.log[2:] == [
        "destroy qp",
        "close capsules",
        "close responses",
        "close cq",
        "close cmid",
        "close channel",
    ]
    assert link.state is LinkState.DEAD


def test_flushes_that_do_not_come_are_not_waited_for_for_ever(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    link.kill(1.0)
    assert link.poll(1.4, 64) == []
    assert link.poll(1.6, 64) == [LinkDead(3)]


@pytest.mark.parametrize("harmless", ["disconnect", "to ERR", "close cq", "close cmid", "close channel"])
def test_it_is_not_dead_before_its_queue_pair_is_destroyed(verbs: FakeVerbs, harmless: str) -> None:
    verbs.fails |= {"destroy qp", harmless}
    link = live_link(verbs)
    link.kill(1.0)
    for now_s in (2.0, 3.0, 4.0):
        assert link.poll(now_s, 64) == []
    verbs.fails.remove("destroy qp")
    assert link.poll(5.0, 64) == [LinkDead(3)]


def test_late_responses_of_a_killed_link_are_not_told(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    verbs.received = {1 << 32: b"late"}
    link.kill(1.0)
    verbs.completions.append(FakeCompletion(1 << 32))
    assert link.poll(1.0, 64) == []


def test_an_error_of_polling_breaks_it(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    verbs.fails.add("poll")
    [broken] = link.poll(0.0, 16)
    assert isinstance(broken, LinkBroken)
    assert FakeVerbsError.__name__ not in broken.error.message
