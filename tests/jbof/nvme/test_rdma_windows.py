"""Memory windows of a link and of the transport, over a stand-in for pyverbs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme import rdma, rdma_link
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.rdma import RdmaTransport, array_region
from meshfusion.jbof.nvme.rdma_completions import invalidation_flag
from meshfusion.jbof.nvme.rdma_link import LinkState, RdmaLink
from meshfusion.jbof.nvme.rdma_queue_pair import Device
from meshfusion.jbof.nvme.rdma_window import VerbsWindow
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import (
    Bind,
    InvalidateKey,
    KeyInvalidated,
    LinkBroken,
    LinkDead,
    LinkUp,
    OpenLink,
    PostCapsule,
    Received,
)
from tests.jbof.nvme.fake_verbs import FakeCompletion, FakeMw, FakeVerbs
from tests.jbof.nvme.test_rdma import FakeAnchorChannel, FakeLink
from tests.jbof.nvme.test_rdma_link import ACCEPTED, DEPTH, FLUSHED, FakeChannel, tell

REGION = "region 5"
MEMORY = RemoteMemory(0x7F0000001000, 8192, 5)


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> FakeVerbs:
    made = FakeVerbs()
    monkeypatch.setattr(rdma_link, "EventChannel", FakeChannel)
    monkeypatch.setattr(rdma, "load_verbs", lambda: made)
    monkeypatch.setattr(rdma, "EventChannel", FakeAnchorChannel)
    monkeypatch.setattr(rdma, "RdmaLink", FakeLink)
    return made


def live_link(verbs: FakeVerbs, window_count: int = 2) -> RdmaLink:
    context = SimpleNamespace(name="rxe0")
    device = Device(cast(Any, verbs), "address", context, "pd", "target", 320, {5: REGION}, 4)
    link = RdmaLink(device, OpenLink(3, DEPTH, b"p" * 32, 5.0, window_count))
    tell(link, verbs, verbs.RDMA_CM_EVENT_ADDR_RESOLVED)
    tell(link, verbs, verbs.RDMA_CM_EVENT_ROUTE_RESOLVED)
    up = LinkUp(3, ACCEPTED, (0x0FF, 0x1FF)[:window_count])
    assert tell(link, verbs, verbs.RDMA_CM_EVENT_CONNECT_RESPONSE, ACCEPTED) == [up]
    del verbs.log[:]
    return link


def test_a_bind_goes_before_its_capsule_and_needs_no_completion(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    link.post(PostCapsule(3, 500, bytes(64), Bind(1, 0x100, MEMORY, is_written=True)))
    link.post(PostCapsule(3, 501, bytes(64), Bind(0, 0x000, MEMORY, is_written=False)))
    assert verbs.log == ["bind", "send", "bind", "send"]
    written, read = verbs.IBV_ACCESS_REMOTE_WRITE, verbs.IBV_ACCESS_REMOTE_READ
    assert verbs.binds == [
        (0x100, REGION, MEMORY.address, 8192, written, 0),
        (0x000, REGION, MEMORY.address, 8192, read, 0),
    ]


def test_the_next_bind_goes_on_from_the_key_of_the_last(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    for key in (0x000, 0x001, 0x002):
        link.post(PostCapsule(3, key, bytes(64), Bind(0, key, MEMORY, is_written=True)))
    assert [bind[0] for bind in verbs.binds] == [0x000, 0x001, 0x002]
    with pytest.raises(AssertionError, match="instead of"):
        link.post(PostCapsule(3, 9, bytes(64), Bind(0, 0x002, MEMORY, is_written=True)))


def test_an_invalidation_is_told_when_it_is_done(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    link.invalidate(InvalidateKey(3, 500, 0x123))
    [(work, key, flags)] = verbs.invalidations
    assert (key, flags) == (0x123, verbs.IBV_SEND_SIGNALED)
    assert link.poll(0.0, 16) == []
    verbs.completions.append(FakeCompletion(work))
    assert link.poll(0.0, 16) == [KeyInvalidated(3, 500)]


def test_the_key_that_came_with_a_response_is_found_by_the_devices_flag(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    verbs.received = {1 << 32: b"one"}
    verbs.completions.append(FakeCompletion(1 << 32, byte_len=3, wc_flags=4, imm_data=0x101))
    assert link.poll(0.0, 16) == [Received(3, b"one", 0x101)]


def test_a_bind_that_fails_breaks_the_link(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    link.post(PostCapsule(3, 500, bytes(64), Bind(0, 0x000, MEMORY, is_written=True)))
    verbs.completions.append(FakeCompletion(1 << 33, status=6))
    [broken] = link.poll(0.0, 16)
    assert isinstance(broken, LinkBroken)
    assert "status 6" in broken.error.message


def test_windows_are_dead_before_the_queue_pair_and_with_it_the_link(verbs: FakeVerbs) -> None:
    link = live_link(verbs)
    link.post(PostCapsule(3, 500, bytes(64), Bind(0, 0x000, MEMORY, is_written=True)))
    link.invalidate(InvalidateKey(3, 400, 0x123))
    link.kill(0.0)
    [(invalidation, _, _)] = verbs.invalidations
    verbs.completions += [FakeCompletion(1 << 32 | slot, status=FLUSHED) for slot in range(DEPTH)]
    verbs.completions += [FakeCompletion(work, status=FLUSHED) for work in (1 << 33, 500)]
    assert link.poll(0.0, 99) == []  # the invalidation is not flushed yet
    verbs.completions.append(FakeCompletion(invalidation, status=FLUSHED))
    verbs.fails.add("close window")
    assert link.poll(0.0, 99) == []
    assert "destroy qp" not in verbs.log
    verbs.fails.clear()
    assert link.poll(0.0, 99) == [LinkDead(3)]
    assert [step for step in verbs.log if step in ("close window", "destroy qp")] == ["close window"] * 2 + [
        "destroy qp"
    ]


def test_a_link_without_room_for_windows_breaks_and_leaves_nothing(verbs: FakeVerbs) -> None:
    device = Device(cast(Any, verbs), "address", SimpleNamespace(name="rxe0"), "pd", "target", 320)
    link = RdmaLink(device, OpenLink(3, DEPTH, b"p" * 32, 5.0, 2))
    tell(link, verbs, verbs.RDMA_CM_EVENT_ADDR_RESOLVED)
    verbs.fails.add("make window")
    [broken] = tell(link, verbs, verbs.RDMA_CM_EVENT_ROUTE_RESOLVED)
    assert isinstance(broken, LinkBroken)
    assert link.state is LinkState.BROKEN
    assert "destroy qp" in verbs.log


def test_a_pyverbs_that_is_not_understood_is_refused(verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "MW", lambda *_: SimpleNamespace(rkey=1, handle=2, type=2))
    with pytest.raises(UnsupportedError, match="pyverbs"):
        VerbsWindow(cast(Any, verbs), "pd", 1)


def test_the_key_is_noted_in_the_window_itself(verbs: FakeVerbs) -> None:
    window = VerbsWindow(cast(Any, verbs), "pd", 1)
    qp = SimpleNamespace(post_send=lambda work: None)
    assert window.key == 0x0FF
    window.bind(qp, 0x000, REGION, 4096, 4096, 2)
    [made] = verbs.windows
    assert isinstance(made, FakeMw)
    assert (made.rkey, made.handle, made.type, window.key) == (0, 40, 2, 0)


# ---- the transport -----------------------------------------------------------------------------------------------


def new_transport(key_scope: KeyScope = KeyScope.COMMAND) -> RdmaTransport:
    return RdmaTransport("127.0.0.1", 4420, time.monotonic() + 1, key_scope=key_scope)


def test_memory_has_no_key_of_its_own_but_scratch_memory_has(verbs: FakeVerbs) -> None:
    transport = new_transport()
    array = np.zeros(800, np.uint8)
    first, second = array_region(transport, array), array_region(transport, array)
    assert verbs.access == verbs.IBV_ACCESS_MW_BIND | verbs.IBV_ACCESS_LOCAL_WRITE
    assert first.remote.rkey != second.remote.rkey, "regions have numbers of their own"
    assert first.remote.length_bytes == 800
    array.flags.writeable = False
    array_region(transport, array)
    assert verbs.access == verbs.IBV_ACCESS_MW_BIND
    scratch = transport.scratch_pool(1).lend()
    assert scratch is not None
    assert scratch.remote.rkey == 2
    assert verbs.access == 1 | 2 | 4
    transport.close()


@pytest.mark.parametrize("kind", [1 << 23, 1 << 24])
def test_windows_of_either_kind_of_type_2_will_do(verbs: FakeVerbs, kind: int) -> None:
    verbs.capabilities = kind
    new_transport().close()


def test_a_device_without_windows_is_refused_and_nothing_is_left(verbs: FakeVerbs) -> None:
    verbs.capabilities = ~(1 << 23 | 1 << 24)
    with pytest.raises(UnsupportedError, match="rxe0 has no memory windows of type 2"):
        new_transport()
    assert verbs.log[-2:] == ["close cmid", "close channel"]
    new_transport(KeyScope.REGION).close()


@pytest.mark.parametrize(("vendor", "flag"), [(0x2C9, 8), (0xFFFFFF, 4), (0, 4)])
def test_soft_roce_tells_of_keys_by_the_kernels_flag(verbs: FakeVerbs, vendor: int, flag: int) -> None:
    """IB_WC_WITH_INVALIDATE is 4 in the kernel's ib_verbs.h, IBV_WC_WITH_INV 8 in libibverbs' verbs.h."""
    context = SimpleNamespace(query_device=lambda: SimpleNamespace(vendor_id=vendor))
    assert invalidation_flag(cast(Any, verbs), context) == flag
