"""Registered memory is given up only when no transfer uses it."""

from __future__ import annotations

import pytest

from meshfusion.jbof.nvme.memory import MemoryInUseError, RegionScratchPool, RegisteredRegion
from meshfusion.jbof.nvme.pending import FateUnknownError, PendingTransfer
from meshfusion.jbof.nvme.queue_effects import QueueLostError
from meshfusion.jbof.nvme.sgl import RemoteMemory
from meshfusion.jbof.nvme.transport import SCRATCH_BYTES

LOST = QueueLostError("lost", next_step="none")


def region(length_bytes: int = 1000, log: list[str] | None = None) -> RegisteredRegion:
    log = [] if log is None else log
    return RegisteredRegion(RemoteMemory(0x1000, length_bytes, 7), object(), lambda: log.append("deregistered"))


def test_parts_address_the_region() -> None:
    made = region()
    assert made.part(100, 50).remote == RemoteMemory(0x1064, 50, 7)
    assert made.all().remote == made.remote
    for wrong in ((0, 1001), (-1, 5), (1000, 1), (5, 0)):
        with pytest.raises(AssertionError):
            made.part(*wrong)


def test_closing_waits_for_every_use() -> None:
    log: list[str] = []
    made = region(log=log)
    made.acquire()
    made.acquire()
    made.release()
    with pytest.raises(MemoryInUseError, match="1 transfers"):
        made.close()
    made.release()
    made.close()
    made.close()
    assert log == ["deregistered"]
    with pytest.raises(AssertionError):
        made.acquire()


def test_revoking_does_not_wait_and_counts_go_on() -> None:
    log: list[str] = []
    made = region(log=log)
    made.acquire()
    made.revoke()
    made.revoke()
    assert (log, made.is_closed, made.use_count) == (["deregistered"], True, 1)
    with pytest.raises(AssertionError):
        made.acquire()
    made.release()
    made.close()
    assert log == ["deregistered"]


def test_a_transfer_holds_its_regions_until_its_memory_is_free() -> None:
    made = region()
    pending = PendingTransfer([made.part(0, 10), made.part(20, 10)], 0.0)
    assert made.use_count == 2
    pending.doubt(LOST)
    with pytest.raises(FateUnknownError) as caught:
        pending.wait()
    assert caught.value.transfer is pending
    assert made.use_count == 2
    assert not pending.wait_memory_free(0)
    pending.free_memory()
    assert pending.wait_memory_free(0)
    assert made.use_count == 0


def test_a_transfer_that_failed_tells_its_error_and_frees_its_memory() -> None:
    made = region()
    pending = PendingTransfer([made.all()], 0.0)
    pending.end(LOST, is_retryable=True)
    with pytest.raises(QueueLostError):
        pending.wait()
    assert (made.use_count, pending.is_retryable) == (0, True)


def test_whoever_asked_is_called_once_at_each_moment() -> None:
    log: list[str] = []
    pending = PendingTransfer([region().all()], 0.0)
    pending.when_ended(lambda: log.append(f"ended, in doubt: {pending.is_in_doubt}"))
    pending.when_memory_free(lambda: log.append("free"))
    assert log == []
    pending.doubt(LOST)
    assert log == ["ended, in doubt: True"]
    assert pending.error is LOST
    pending.free_memory()
    assert log[1:] == ["free"]
    pending.when_ended(lambda: log.append("ended before"))
    pending.when_memory_free(lambda: log.append("free before"))
    assert log[2:] == ["ended before", "free before"]


def test_who_hears_of_a_certain_end_may_use_the_memory() -> None:
    made = region()
    pending = PendingTransfer([made.all()], 0.0)
    seen: list[tuple[bool, int]] = []
    pending.when_ended(lambda: seen.append((pending.wait_memory_free(0), made.use_count)))
    pending.end()
    assert seen == [(True, 0)]
    assert pending.error is None


def test_a_transfer_that_nobody_ends_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.jbof.nvme.pending._GRACE_S", 0.01)
    with pytest.raises(FateUnknownError, match="did not end"):
        PendingTransfer([], 0.0).wait()


def test_scratch_memory_is_lent_and_given_back() -> None:
    buffer = bytearray(2 * SCRATCH_BYTES)
    pool = RegionScratchPool(region(len(buffer)), buffer)
    first, second = pool.lend(), pool.lend()
    assert first is not None
    assert second is not None
    assert pool.lend() is None
    assert {first.remote.address, second.remote.address} == {0x1000, 0x1000 + SCRATCH_BYTES}
    first.write(b"abc")
    assert first.read(4) == b"abc\0"
    offset = first.remote.address - 0x1000
    assert buffer[offset : offset + 3] == b"abc"
    pool.give_back(first)
    assert pool.lend() is first
    pool.give_back(second)
    with pytest.raises(AssertionError):
        pool.give_back(second)
