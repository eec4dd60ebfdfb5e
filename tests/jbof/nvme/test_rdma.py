"""The transport over a stand-in for pyverbs: finding the device, links by their numbers, memory, the end."""

from __future__ import annotations

import errno
import time
from typing import Any

import numpy as np
import pytest

from meshfusion.jbof.errors import ConfigError, MediaError, UnsupportedError
from meshfusion.jbof.nvme import rdma
from meshfusion.jbof.nvme.memory import MemoryInUseError
from meshfusion.jbof.nvme.rdma import RdmaTransport, array_region
from meshfusion.jbof.nvme.rdma_link import LinkState
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import KillLink, LinkBroken, LinkDead, OpenLink, PostCapsule
from tests.jbof.nvme.fake_verbs import FakeVerbs


class FakeAnchorChannel:
    channel = "channel"

    def __init__(self, verbs: FakeVerbs) -> None:
        self._verbs = verbs

    def wait_for(self, kind: int, deadline_s: float) -> None:
        if f"wait {kind}" in self._verbs.fails:
            raise MediaError("no answer", next_step="none")

    def close(self) -> None:
        self._verbs.do("close channel")


class FakeLink:
    """In place of :class:`~meshfusion.jbof.nvme.rdma_link.RdmaLink`; dead two polls after it is killed."""

    event_fd = None

    def __init__(self, device: Any, request: OpenLink) -> None:
        self.link, self.state = request.link, LinkState.UP
        self.posted: list[PostCapsule] = []
        self.polls_left = 2

    def post(self, effect: PostCapsule) -> None:
        self.posted.append(effect)

    def kill(self, now_s: float) -> None:
        assert self.state is LinkState.UP
        self.state = LinkState.DRAINING

    def poll(self, now_s: float, max_count: int) -> list[Any]:
        if self.state is LinkState.UP:
            return [LinkBroken(self.link, MediaError("b", next_step="none"))]
        self.polls_left -= 1
        return [LinkDead(self.link)] if self.polls_left == 0 else []


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> FakeVerbs:
    made = FakeVerbs()
    monkeypatch.setattr(rdma, "load_verbs", lambda: made)
    monkeypatch.setattr(rdma, "EventChannel", FakeAnchorChannel)
    monkeypatch.setattr(rdma, "RdmaLink", FakeLink)
    return made


def new_transport(**options: Any) -> RdmaTransport:
    return RdmaTransport("127.0.0.1", 4420, time.monotonic() + 1, **options)


def test_the_device_is_the_one_that_leads_there(verbs: FakeVerbs) -> None:
    transport = new_transport(source_address="127.0.0.9")
    assert verbs.log == ["resolve address", "resolve route"]
    assert verbs.address == {"src": "127.0.0.9", "dst": "127.0.0.1", "dst_service": "4420", "port_space": 6}
    assert transport.device_name == "rxe0"
    transport.close()
    assert verbs.log[2:] == ["close pd", "close cmid", "close channel"]


@pytest.mark.parametrize("step", ["resolve address", "resolve route", "wait 0", "wait 2"])
def test_nothing_is_left_when_none_does(verbs: FakeVerbs, step: str) -> None:
    verbs.fails.add(step)
    with pytest.raises(MediaError):
        new_transport()
    assert verbs.log[-2:] == ["close cmid", "close channel"]


def test_an_address_that_is_none(verbs: FakeVerbs) -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        RdmaTransport("no.such.host.invalid", 4420, time.monotonic() + 1)
    assert verbs.log == ["close channel"]


def test_links_live_from_their_opening_to_their_death(verbs: FakeVerbs) -> None:
    transport = new_transport()
    for number in (1, 2):
        transport.carry_out(0.0, OpenLink(number, 8, b"", 1.0))
    transport.carry_out(0.0, PostCapsule(2, 5, b"capsule"))
    assert [event.link for event in transport.poll(0.0)] == [1, 2]
    transport.carry_out(0.0, KillLink(1))
    assert [type(event) for event in transport.poll(0.0)] == [LinkBroken]
    assert not transport.is_idle
    transport.kill_all(0.0)  # 1 is being killed already
    assert transport.poll(0.0) == [LinkDead(1)]
    assert transport.poll(0.0) == [LinkDead(2)]
    assert transport.is_idle


def test_memory_is_registered_with_the_rights_that_it_allows(verbs: FakeVerbs) -> None:
    transport = new_transport()
    array = np.zeros((4, 100), np.uint16)
    region = array_region(transport, array)
    assert (region.remote.address, region.remote.length_bytes, region.remote.rkey) == (array.ctypes.data, 800, 2)
    assert verbs.access == 1 | 2 | 4
    array.flags.writeable = False
    array_region(transport, array)
    assert verbs.access == 4, "targets could write to memory that is only to be read"
    region.acquire()
    with pytest.raises(MemoryInUseError):
        region.close()
    region.release()
    region.close()
    assert verbs.log[-1] == "close responses"  # the stand-in's name for a short region


def test_memory_that_cannot_be_registered(verbs: FakeVerbs) -> None:
    transport = new_transport()
    for array in (np.zeros((4, 4))[:, 1], np.zeros(0)):
        with pytest.raises(ConfigError):
            array_region(transport, array)
    verbs.fails.add("register")
    with pytest.raises(MediaError, match="ulimit"):
        array_region(transport, np.zeros(8))


def test_a_dma_buf_is_addressed_by_its_offset(verbs: FakeVerbs) -> None:
    transport = new_transport()
    owner = object()
    region = transport.register(DmaBufRange(9, 4100, 800), writable=True, owner=owner)
    assert verbs.log[-1] == "register dma-buf 9 from 4100"
    assert verbs.access == 1 | 2 | 4
    assert region.remote == RemoteMemory(4100, 800, 2)
    assert region.part(10, 20).remote == RemoteMemory(4110, 20, 2)


def test_a_device_that_takes_no_dma_bufs(verbs: FakeVerbs) -> None:
    transport = new_transport()
    verbs.fails.add("register dma-buf 9 from 0")
    with pytest.raises(MediaError, match="100 bytes at 0 of a dma-buf cannot be registered with rxe0"):
        transport.register(DmaBufRange(9, 0, 100), writable=True, owner=None)
    verbs.error_code = errno.EOPNOTSUPP  # what Linux' soft-RoCE answers
    with pytest.raises(UnsupportedError, match="rxe0 cannot register dma-bufs"):
        transport.register(DmaBufRange(9, 0, 100), writable=True, owner=None)
    transport.close()


def test_closing_revokes_every_key_before_the_device_goes(verbs: FakeVerbs) -> None:
    transport = new_transport()
    kept, given_up = (array_region(transport, np.zeros(8)) for _ in range(2))
    dma_buf = transport.register(DmaBufRange(9, 0, 8000), writable=True, owner=None)
    given_up.close()
    kept.acquire()  # a transfer in doubt, whose queue pair is dead
    del verbs.log[:]
    transport.close()
    assert verbs.log == ["close responses", "close capsules", "close pd", "close cmid", "close channel"]
    assert [region.is_closed for region in (kept, given_up, dma_buf)] == [True, True, True]
    with pytest.raises(AssertionError, match="closed"):
        dma_buf.acquire()
    kept.release()
    kept.close()


def test_a_key_that_cannot_be_revoked_is_not_said_to_be(verbs: FakeVerbs) -> None:
    transport = new_transport()
    stuck = transport.register(AddressRange(0x1000, 8), writable=True, owner=None)
    other = transport.register(AddressRange(0x2000, 8000), writable=True, owner=None)
    verbs.fails.add("close responses")
    with pytest.raises(MediaError, match="does not end access"):
        stuck.close()
    with pytest.raises(MediaError, match="does not end access"):
        transport.close()
    assert (stuck.is_closed, other.is_closed) == (False, True)
    assert "close pd" not in verbs.log
    verbs.fails.clear()
    transport.close()
    assert stuck.is_closed
    assert "close pd" in verbs.log


def test_scratch_memory_goes_with_the_transport(verbs: FakeVerbs) -> None:
    transport = new_transport()
    pool = transport.scratch_pool(3)
    lent = [pool.lend() for _ in range(4)]
    assert [scratch is None for scratch in lent] == [False, False, False, True]
    transport.close()
    assert "close capsules" in verbs.log  # the stand-in's name for a long region
