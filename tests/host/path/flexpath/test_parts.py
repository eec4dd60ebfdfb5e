"""The small parts: what waits, what is not flushed, which namespaces are one, memory of all paths, work in turns."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.path.flexpath.backlog import Backlog
from meshfusion.host.path.flexpath.regions import SharedRegion, parts_on
from meshfusion.host.path.flexpath.requests import Kind, Request
from meshfusion.host.path.flexpath.same_namespace import SameNamespaces
from meshfusion.host.path.flexpath.serial import Serial
from meshfusion.host.path.flexpath.unflushed import Unflushed
from meshfusion.jbof.nvme.inventory import Inventory
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.memory import MemoryInUseError, RegisteredRegion
from meshfusion.jbof.nvme.namespaces import NamespaceIds
from meshfusion.jbof.nvme.registration import AddressRange
from meshfusion.jbof.nvme.sgl import RemoteMemory
from tests.host.path.flexpath.inventories import namespace

# ---- what waits ------------------------------------------------------------------------------------------------------


def _is_as_long(length_bytes: int, waiting: Request) -> bool:
    return waiting.length_bytes >= length_bytes


@given(st.lists(st.tuples(st.sampled_from(["add", "first", "pop", "take"]), st.integers(1, 3), st.integers(1, 9))))
def test_the_backlog_is_a_queue_for_each_namespace(steps: list[tuple[str, int, int]]) -> None:
    backlog, expected = Backlog(), dict[int, list[Request]]()
    for what, nsid, length_bytes in steps:
        queue = expected.setdefault(nsid, [])
        request = Request(None, Kind.READ, nsid, length_bytes, 0.0)
        if what == "add":
            backlog.add(request)
            queue.append(request)
        elif what == "first":
            backlog.add_first(request)
            queue.insert(0, request)
        elif what == "pop" and queue:
            assert backlog.pop(nsid) is queue.pop(0)
        elif what == "take":
            taken = backlog.take(partial(_is_as_long, length_bytes))
            assert sorted(map(id, taken)) == sorted(
                id(waiting) for other in expected.values() for waiting in other if waiting.length_bytes >= length_bytes
            )
            expected = {
                number: [waiting for waiting in other if waiting.length_bytes < length_bytes]
                for number, other in expected.items()
            }
        assert len(backlog) == sum(map(len, expected.values()))
        for number, other in expected.items():
            assert backlog.first(number) is (other[0] if other else None)
            assert backlog.length_bytes(number) == sum(waiting.length_bytes for waiting in other)
        assert set(backlog.nsids()) == {number for number, other in expected.items() if other}


def test_namespaces_take_turns() -> None:
    backlog = Backlog()
    for nsid in (1, 2, 3):
        backlog.add(Request(None, Kind.READ, nsid, 1, 0.0))
    assert {backlog.nsids()[0] for _ in range(3)} == {1, 2, 3}


# ---- what is not flushed ---------------------------------------------------------------------------------------------


def test_every_path_that_was_written_over_is_flushed() -> None:
    unflushed = Unflushed()
    for path, nsid in ((2, 1), (0, 1), (1, 7), (2, 1)):
        unflushed.wrote(path, nsid)
    assert unflushed.paths(1) == [0, 2]
    assert unflushed.settle(1) == []
    assert unflushed.paths(1) == []
    assert unflushed.paths(7) == [1]


def test_a_lost_connection_takes_what_was_not_flushed_with_it_once() -> None:
    unflushed = Unflushed()
    unflushed.wrote(0, 1)
    unflushed.settle(1)
    unflushed.lost(0)
    assert unflushed.settle(1) == [], "that was durable"
    unflushed.wrote(0, 1)
    unflushed.wrote(1, 1)
    unflushed.lost(0)
    unflushed.wrote(0, 1)  # over the next connection
    assert unflushed.paths(1) == [0, 1]
    assert unflushed.settle(1) == [0]
    assert unflushed.settle(1) == []


# ---- one namespace ---------------------------------------------------------------------------------------------------


def inventory(ids: NamespaceIds, problem: str | None = None, lba_bytes: int = 4096) -> Inventory:
    made = replace(namespace(7, ids, lba_bytes=lba_bytes), problem=problem)
    return Inventory(MappingProxyType({7: made}))


ONE, OTHER = NamespaceIds(nguid=b"1" * 16), NamespaceIds(nguid=b"2" * 16)


def test_the_same_identifier_is_the_same_namespace() -> None:
    same = SameNamespaces()
    assert same.access(0, inventory(ONE)) == {7: AnaState.OPTIMIZED}
    assert same.access(1, inventory(ONE)) == {7: AnaState.OPTIMIZED}
    assert same.access(2, inventory(OTHER)) == {}
    assert same.access(0, inventory(OTHER)) == {}, "it was replaced by another one"


@pytest.mark.parametrize("ids", [NamespaceIds(uuid=uuid.UUID(int=5)), NamespaceIds(eui64=b"8" * 8)])
def test_any_worldwide_identifier_counts(ids: NamespaceIds) -> None:
    same = SameNamespaces()
    assert same.access(0, inventory(ids))
    assert same.access(1, inventory(ids))


def test_without_an_identifier_only_the_first_path_is_used() -> None:
    same = SameNamespaces()
    assert same.access(1, inventory(NamespaceIds()))
    assert not same.access(0, inventory(NamespaceIds()))
    assert same.access(1, inventory(NamespaceIds()))


def test_what_cannot_be_used_or_has_other_blocks_is_left_out() -> None:
    same = SameNamespaces()
    assert not same.access(0, inventory(ONE, problem="has metadata"))
    assert same.access(0, inventory(ONE))
    assert not same.access(1, inventory(ONE, lba_bytes=512))


# ---- memory of all paths ---------------------------------------------------------------------------------------------


def shared(log: list[object]) -> SharedRegion:
    region = SharedRegion(AddressRange(0x1000, 100), writable=True, owner=object(), forget=log.append)
    for path in (0, 1):
        # A dma-buf is addressed by an offset, so paths may differ in the address too.
        remote = RemoteMemory(0x1000 * (1 - path), 100, 70 + path)
        region.put(path, RegisteredRegion(remote, None, lambda path=path: log.append(path)))  # type: ignore[misc]
    return region


def test_each_path_has_its_own_key_for_the_same_bytes() -> None:
    region = shared([])
    parts = [region.part(10, 20), region.part(50, 5)]
    assert [part.remote for part in parts_on(0, parts)] == [RemoteMemory(0x100A, 20, 70), RemoteMemory(0x1032, 5, 70)]
    assert [part.remote for part in parts_on(1, parts)] == [RemoteMemory(10, 20, 71), RemoteMemory(50, 5, 71)]


def test_it_is_closed_on_every_path_when_nothing_uses_it() -> None:
    log: list[object] = []
    region = shared(log)
    region.acquire()
    with pytest.raises(MemoryInUseError):
        region.close()
    region.release()
    region.close()
    assert log == [region, 0, 1]


# ---- work in turns ---------------------------------------------------------------------------------------------------


def test_work_is_done_by_one_at_a_time_and_all_of_it() -> None:
    done: list[int] = []
    at_work, overlaps = threading.Lock(), []

    def work(item: int) -> None:
        if not at_work.acquire(blocking=False):
            overlaps.append(item)
            return
        done.append(item)
        at_work.release()

    serial = Serial(work)

    def put_all(n: int) -> None:
        for i in range(1000):
            serial.put(n * 1000 + i)

    threads = [threading.Thread(target=put_all, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert sorted(done) == list(range(4000))
    for n in range(4):
        assert [item for item in done if item // 1000 == n] == list(range(n * 1000, n * 1000 + 1000))


def test_what_work_puts_comes_after_it() -> None:
    log: list[str] = []

    def work(item: str) -> None:
        if item == "a":
            serial.put("b")
        log.append(item)

    serial = Serial(work)
    serial.put("a")
    assert log == ["a", "b"]
