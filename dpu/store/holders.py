"""Who is attached, who has gone silent, and who is being cut off. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshfusion.dpu.api.types import Access
from meshfusion.dpu.store.effects import HolderRecord


@dataclass(slots=True)
class Holder:
    record: HolderRecord
    last_seen_s: float
    current: bool  # attached in this epoch
    admission: int = 0  # ticket of its durable listing, 0 once listed: it may do nothing before (rule 3)
    condemned: bool = False  # refused from now on: its access to the target is being taken away
    fencing: bool = False  # its fence is being made durable

    @property
    def is_local(self) -> bool:
        return self.record.access is Access.LOCAL


class HolderTable:
    """Holders that are not fenced, and the ids of those that are. ``silence_s``: without a word, then one is doubted.

    With local access a holder is gone when its liveness lock can be taken (rule 3): it is *probed*. One that reaches
    a target is *condemned*, and gone when the target confirms that it is cut off.
    """

    def __init__(self, former: Iterable[HolderRecord], *, silence_s: float, now_s: float) -> None:
        self._silence_s = silence_s
        self._holders: dict[str, Holder] = {}
        self._fenced: set[str] = set()
        for record in former:
            if record.fenced:
                self._fenced.add(record.holder_id)
            else:
                self._holders[record.holder_id] = Holder(record, last_seen_s=now_s, current=False)

    def __iter__(self) -> Iterator[Holder]:
        return iter(tuple(self._holders.values()))

    def get(self, holder_id: str) -> Holder | None:
        return self._holders.get(holder_id)

    def knows(self, holder_id: str) -> bool:
        return holder_id in self._holders

    def is_fenced(self, holder_id: str) -> bool:
        """Never to be admitted again."""
        return holder_id in self._fenced

    def is_served(self, holder: Holder) -> bool:
        """May it ask for anything?"""
        is_listed = holder.current and not holder.admission
        return is_listed and not holder.condemned and holder.record.holder_id not in self._fenced

    def add(self, holder: Holder) -> None:
        self._holders[holder.record.holder_id] = holder

    def remove(self, holder_id: str) -> None:
        self._holders.pop(holder_id, None)

    def answered(self, now_s: float, holder_id: str) -> None:
        """It is told only now that it is attached: it could not be heard of before."""
        holder = self._holders.get(holder_id)
        if holder is not None:
            holder.last_seen_s = now_s

    def fence(self, holder: Holder) -> None:
        """Its fence is on its way to the medium."""
        holder.fencing = True
        self._fenced.add(holder.record.holder_id)

    def condemn(self, holder_id: str) -> None:
        """A holder of a target is refused from now on, whatever it says, and is to be cut off."""
        holder = self._holders.get(holder_id)
        if holder is not None:
            assert not holder.is_local, "a process that has the data open cannot be cut off"
            holder.condemned = True

    def condemn_silent(self, now_s: float) -> int:
        """Those of a target that were silent for too long; how many."""
        silent = [h for h in self if not h.is_local and not h.condemned and self.is_silent(h, now_s)]
        for holder in silent:
            self.condemn(holder.record.holder_id)
        return len(silent)

    def to_cut_off(self) -> tuple[str, ...]:
        """Condemned ones whose target has not confirmed yet that they are gone."""
        return tuple(h.record.holder_id for h in self if h.condemned and not h.fencing)

    def to_serve(self) -> tuple[str, ...]:
        """Those that shall reach the target, once they are listed durably: also of an earlier epoch, until they have
        been silent for too long."""
        return tuple(h.record.holder_id for h in self if not (h.is_local or h.admission or h.condemned or h.fencing))

    def to_probe(self, now_s: float) -> tuple[str, ...]:
        """Holders whose liveness lock should be tried: silent ones and those of an earlier epoch."""
        return tuple(
            h.record.holder_id
            for h in self
            if h.is_local and not h.fencing and (not h.current or self.is_silent(h, now_s))
        )

    def all_current(self) -> bool:
        """Has every holder of an earlier epoch re-asserted itself or been fenced?"""
        return all(holder.current for holder in self._holders.values())

    def is_silent(self, holder: Holder, now_s: float) -> bool:
        return now_s - holder.last_seen_s >= self._silence_s

    def state(self, holder: Holder, now_s: float) -> str:
        """For people: see :class:`~meshfusion.dpu.api.types.HolderStatus`."""
        if holder.condemned:
            return "condemned"
        if not holder.current:
            return "former"
        return "silent" if self.is_silent(holder, now_s) else "live"
