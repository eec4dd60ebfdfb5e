"""Reads and writes all over a device, a number of them at a time, with every byte, end and deadline looked at."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshfusion.host.path.flexpath.multipath import Multipath
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingTransfer

NSID: Final = 1
LBA_BYTES: Final = 4096
TRANSFER_BYTES: Final = 32 << 10
TRANSFER_LBAS: Final = TRANSFER_BYTES // LBA_BYTES
UNDER_WAY: Final = 32
READ_LBAS: Final = 8 << 20 >> 12
"""Below are reads, above is one place after the other for writes."""
PLACES: Final = 256
DEVICE_MIB: Final = (READ_LBAS + PLACES * TRANSFER_LBAS) * LBA_BYTES >> 20

_SLOTS: Final = 3 * UNDER_WAY  # so that memory which was given back rests for a while before it is used again
_PAINT: Final = 0xA5
_FAILURE_PAUSE_S: Final = 0.01  # without a path all fail at once
_WORDS: Final = LBA_BYTES // 8

Words = NDArray[np.uint64]


def stamp(lba: int, lba_count: int, attempt: int) -> Words:
    """What lies at these blocks when write number ``attempt`` wrote them; 0 is how the device was at first.

    Every word of 8 bytes differs from every other, and from that of any other attempt.
    """
    assert attempt < 1 << 24
    first = (attempt << 40) + lba * _WORDS
    return np.arange(first, first + lba_count * _WORDS, dtype=np.uint64)


class Place(NamedTuple):
    """Of writes. ``attempts``: whose content may be there, each block that of one of them. ``is_in_doubt``: content
    may still land."""

    lba: int
    attempts: tuple[int, ...]
    is_in_doubt: bool = False


UNWRITTEN: Final = tuple(Place(READ_LBAS + number * TRANSFER_LBAS, (0,)) for number in range(PLACES))


@dataclass(slots=True, eq=False)
class _Transfer:
    """``place``: None for a read of what was there at first. ``attempt``: what is written, or should be read."""

    is_write: bool
    place: int | None
    lba: int
    attempt: int
    slot: int
    deadline_s: float
    ended_s: float = 0.0


class MixedLoad:
    """A write for every read, from :meth:`start` to :meth:`stop`, on a thread of its own.

    ``places``: as the load before left them. What was reported as written is read back before its place is written
    again; a write whose fate is not known leaves its place for good, like a segment in quarantine. Memory is painted
    when it was told to be free, and looked at before it is used again.
    """

    def __init__(self, initiator: Multipath, places: Sequence[Place], *, timeout_s: float) -> None:
        self._initiator = initiator
        self._timeout_s = timeout_s
        self._memory = np.full(_SLOTS * TRANSFER_BYTES, _PAINT, np.uint8)
        self._region: RegisteredRegion = initiator.register_address(
            self._memory.ctypes.data, self._memory.nbytes, writable=True, owner=self._memory
        )
        self._rng = np.random.default_rng(9)
        self._resting = deque(range(_SLOTS))
        self._places = list(places)
        self._ready = deque(number for number, place in enumerate(places) if not place.is_in_doubt)  # to be written
        self._written: deque[int] = deque()  # to be read back
        self._last_attempt = max(max(place.attempts) for place in places)
        self._begun = 0
        self._under_way = 0
        self._in_use = 0  # slots
        # Without a pending transfer: its memory is free.
        self._told: queue.SimpleQueue[tuple[_Transfer, PendingTransfer | None]] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._crash: BaseException | None = None
        self.ends: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()  # of those that failed, by kind
        self.wrong_reads = 0  # also of what was reported as written
        self.touched = 0  # memory that was changed after it was given back
        self.late_s = -1e9  # the most that anything was told later than its deadline
        self.memory_late_s = -1e9  # the same, of memory given back
        self._done_s: list[float] = []

    # ---- for the test --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Everything has ended and all memory is free when this returns. Raises what went wrong with the load."""
        self._is_stopping.set()
        self._thread.join()
        if self._crash is not None:
            raise self._crash

    def mbit_per_s(self, from_s: float, to_s: float) -> float:
        count = sum(from_s <= at_s < to_s for at_s in self._done_s)
        return count * TRANSFER_BYTES * 8 / (to_s - from_s) / 1e6

    def places(self) -> list[Place]:
        return list(self._places)

    def look_at_resting_memory(self) -> None:
        """Counts what was touched since it was given back; all of it is, when the load was stopped."""
        for slot in self._resting:
            self._look_at(slot)

    def evidence(self) -> dict[str, object]:
        return {
            "ends": dict(sorted(self.ends.items())),
            "errors": dict(sorted(self.errors.items())),
            "wrong_reads": self.wrong_reads,
            "touched": self.touched,
            "late_s": round(self.late_s, 3),
            "memory_late_s": round(self.memory_late_s, 3),
        }

    # ---- on its thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set() or self._in_use:
                while not self._is_stopping.is_set() and self._under_way < UNDER_WAY and self._resting:
                    self._begin()
                try:
                    transfer, pending = self._told.get(timeout=0.1)
                except queue.Empty:
                    continue
                if pending is not None:
                    self._ended(transfer, pending)
                else:
                    self.memory_late_s = max(self.memory_late_s, time.monotonic() - transfer.deadline_s)
                    self._rest(transfer.slot)
        except BaseException as error:
            self._crash = error

    def _begin(self) -> None:
        slot = self._resting.popleft()
        self._look_at(slot)
        self._begun += 1
        self._under_way += 1
        self._in_use += 1
        deadline_s = time.monotonic() + self._timeout_s
        part = self._region.part(slot * TRANSFER_BYTES, TRANSFER_BYTES)
        if self._begun % 2 and self._ready:
            place = self._ready.popleft()
            self._last_attempt += 1
            transfer = _Transfer(True, place, self._places[place].lba, self._last_attempt, slot, deadline_s)
            self._words(slot)[:] = _content(transfer)
            pending = self._initiator.begin_write(NSID, transfer.lba, [part], timeout_s=self._timeout_s)
        else:
            transfer = self._next_read(slot, deadline_s)
            pending = self._initiator.begin_read(NSID, transfer.lba, [part], timeout_s=self._timeout_s)
        pending.when_ended(partial(self._on_ended, transfer, pending))

    def _next_read(self, slot: int, deadline_s: float) -> _Transfer:
        if self._written and len(self._ready) < UNDER_WAY:
            place = self._written.popleft()
            lba, attempts, _ = self._places[place]
            return _Transfer(False, place, lba, attempts[0], slot, deadline_s)
        lba = int(self._rng.integers(0, READ_LBAS - TRANSFER_LBAS + 1))
        return _Transfer(False, None, lba, 0, slot, deadline_s)

    def _on_ended(self, transfer: _Transfer, pending: PendingTransfer) -> None:
        """On a thread of FlexPath: the moment counts, not when the load gets to it."""
        transfer.ended_s = time.monotonic()
        self._told.put((transfer, pending))

    def _ended(self, transfer: _Transfer, pending: PendingTransfer) -> None:
        self._under_way -= 1
        self.late_s = max(self.late_s, transfer.ended_s - transfer.deadline_s)
        outcome = "in doubt" if pending.is_in_doubt else "done" if pending.error is None else "failed"
        self.ends[f"{'write' if transfer.is_write else 'read'} {outcome}"] += 1
        if outcome == "done":
            self._done_s.append(transfer.ended_s)
        if transfer.is_write:
            self._write_ended(transfer, pending)
        else:
            self._read_ended(transfer, is_done=outcome == "done")
        if outcome == "failed":
            self.errors[type(pending.error).__name__] += 1
            time.sleep(_FAILURE_PAUSE_S)
        if pending.is_in_doubt:
            pending.when_memory_free(partial(self._told.put, (transfer, None)))
        else:
            self._rest(transfer.slot)

    def _write_ended(self, transfer: _Transfer, pending: PendingTransfer) -> None:
        assert transfer.place is not None
        lba, attempts, _ = self._places[transfer.place]
        if pending.error is None:
            self._places[transfer.place] = Place(lba, (transfer.attempt,))
            self._written.append(transfer.place)
            return
        self._places[transfer.place] = Place(lba, (*attempts, transfer.attempt), pending.is_in_doubt)
        if not pending.is_in_doubt:
            self._ready.append(transfer.place)

    def _read_ended(self, transfer: _Transfer, *, is_done: bool) -> None:
        if is_done:
            self.wrong_reads += not np.array_equal(self._words(transfer.slot), _content(transfer))
        if transfer.place is not None:
            (self._ready if is_done else self._written).append(transfer.place)

    def _words(self, slot: int) -> Words:
        return self._memory[slot * TRANSFER_BYTES : (slot + 1) * TRANSFER_BYTES].view(np.uint64)

    def _rest(self, slot: int) -> None:
        self._words(slot).view(np.uint8)[:] = _PAINT
        self._resting.append(slot)
        self._in_use -= 1

    def _look_at(self, slot: int) -> None:
        self.touched += not bool((self._words(slot).view(np.uint8) == _PAINT).all())


def _content(transfer: _Transfer) -> Words:
    return stamp(transfer.lba, TRANSFER_LBAS, transfer.attempt)


def wrong_blocks(medium: Words, places: Sequence[Place]) -> dict[str, int]:
    """Blocks of the whole device that hold what nobody wrote there; and of places whose last write is certain, that
    hold anything else."""
    blocks = medium.reshape(-1, _WORDS)
    lbas = np.arange(len(blocks), dtype=np.uint64)
    attempts = blocks[:, 0] >> np.uint64(40)
    whole = blocks == (blocks[:, :1] + np.arange(_WORDS, dtype=np.uint64))
    at_home = (blocks[:, 0] & np.uint64((1 << 40) - 1)) == lbas * np.uint64(_WORDS)
    foreign = ~(whole.all(axis=1) & at_home)
    foreign[:READ_LBAS] |= attempts[:READ_LBAS] != 0
    lost = 0
    for place in places:
        held = slice(place.lba, place.lba + TRANSFER_LBAS)
        others = ~np.isin(attempts[held], place.attempts)
        foreign[held] |= others
        lost += int(others.sum()) if len(place.attempts) == 1 else 0
    return {"foreign": int(foreign.sum()), "lost": lost}
