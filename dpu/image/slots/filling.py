"""Putting an image into the slot that nothing runs from: copied where an earlier run left off, then unpacked."""

from __future__ import annotations

from typing import Final

from meshfusion.dpu.image.errors import FaultKind
from meshfusion.dpu.image.slots import words
from meshfusion.dpu.image.slots.card_state import CardState
from meshfusion.dpu.image.slots.talk import PASSING, RETRY_S, EndedError, Steps, Talk, Trying, failed
from meshfusion.dpu.image.slots.types import Faulted, Forget, Phase, Put, Unpack, Wait, Wanted

PIECE_BYTES: Final = 8 << 20
DAMAGED_ATTEMPTS: Final = 3


class Filling:
    """``done_bytes``: of what is copied."""

    def __init__(self, talk: Talk, wanted: Wanted) -> None:
        self._talk, self._wanted = talk, wanted
        self.done_bytes = 0

    @property
    def total_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self._wanted.blobs)

    def run(self, slot: str, state: CardState) -> Steps:
        """Raises EndedError."""
        talk = self._talk
        talk.enter(Phase.COPYING)
        if not self._wanted.blobs:
            raise EndedError(Phase.FAILED, *words.NOT_THERE)
        needed = {name for blob in self._wanted.blobs for name in (blob.digest, f"{blob.digest}.part")}
        if useless := tuple(sorted(set(state.blobs) - needed)):
            yield from talk.insist(Forget(useless))
        for attempt in range(1, DAMAGED_ATTEMPTS + 1):
            yield from self._copy_all()
            talk.enter(Phase.UNPACKING)
            event = yield from talk.insist(Unpack(slot, self._wanted), passes=FaultKind.DAMAGED)
            if not isinstance(event, Faulted):
                break
            if attempt == DAMAGED_ATTEMPTS:
                raise failed(event)
            talk.enter(Phase.COPYING)
        yield from talk.insist(Forget(tuple(blob.digest for blob in self._wanted.blobs)))

    def _copy_all(self) -> Steps:
        damaged = 0
        while True:
            state = yield from self._talk.look()
            put = self._next_put(state)
            if put is None:
                return
            fault = yield from self._copy(put)
            if fault is None:
                continue
            damaged += fault.kind is FaultKind.DAMAGED
            if fault.kind not in PASSING | {FaultKind.DAMAGED} or damaged == DAMAGED_ATTEMPTS:
                raise failed(fault)
            if self._talk.is_late:
                raise self._talk.late(fault.message, fault.next_step)
            yield from self._talk.do(Wait(self._talk.now_s + RETRY_S))

    def _copy(self, put: Put | None) -> Trying:
        """From there to the end of the blob."""
        while put is not None:
            event = yield from self._talk.do(put)
            if isinstance(event, Faulted):
                return event
            self.done_bytes += put.length_bytes
            if self._talk.is_late:
                raise self._talk.late()
            put = _after(put)
        return None

    def _next_put(self, state: CardState) -> Put | None:
        """Where to go on with the first blob that is not there; and how much is."""
        self.done_bytes, found = 0, None
        for blob in self._wanted.blobs:
            if state.blobs.get(blob.digest) == blob.size_bytes:
                self.done_bytes += blob.size_bytes
                continue
            part = state.blobs.get(f"{blob.digest}.part", 0)
            self.done_bytes += min(part, blob.size_bytes)
            if found is None:
                found = Put(blob, part, max(0, min(PIECE_BYTES, blob.size_bytes - part)))
        return found


def _after(put: Put) -> Put | None:
    """The next piece of the same blob; None behind its end."""
    offset_bytes = put.offset_bytes + put.length_bytes
    left_bytes = put.blob.size_bytes - offset_bytes
    return Put(put.blob, offset_bytes, min(PIECE_BYTES, left_bytes)) if left_bytes > 0 else None
