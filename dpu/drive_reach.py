"""Which engines reach which drives of a pool that is served. Under the pool's mutex; no I/O, no clock.

With each change of the drives their *version* grows, and an engine learns with its next heartbeat that it is to ask
anew. Until it has, what lies on a new drive is a miss for it. An engine of this machine opens the drives itself, and
nothing is written to a new one before all of them have asked. A host of a target says what all its workers have opened
and proven, and gets places on these drives only; one that never says so (an earlier version) stays with those that were
there when it came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.holders import HolderTable
from meshfusion.jbof.pool_addresses import drive_of_namespace, drive_of_segment


@dataclass(frozen=True, slots=True)
class _Reach:
    """Of a host of a target: drives, as they were in a version."""

    version: int
    numbers: frozenset[int]


class DriveReach:
    """``holders``: the store's. Holders that it knows no more are forgotten here too."""

    def __init__(self, holders: HolderTable) -> None:
        self.version = 0  # of the ways in which drives are reached
        self._holders = holders
        self._since: dict[int, int] = {}  # drive -> the version that it came with
        self._told: dict[str, int] = {}  # engine of this machine -> the version that it was told last
        self._reached: dict[str, _Reach] = {}  # host of a target

    # ---- drives --------------------------------------------------------------------------------------------------

    def has_come(self, number: int) -> None:
        """It is to be opened by every engine, anew: it may lie elsewhere now, and those that came meanwhile have never
        seen it."""
        self.version += 1
        self._since[number] = self.version

    def has_left(self, number: int) -> None:
        self.version += 1
        self._since.pop(number, None)

    # ---- engines -------------------------------------------------------------------------------------------------

    def told(self, holder_id: str, version: int, numbers: Collection[int]) -> None:
        """The holder has asked, and knows the drives as they were with ``version``: these. What it reaches of them when
        it asks again, a host of a target says itself."""
        holder = self._holders.get(holder_id)
        if holder is not None and holder.is_local:
            self._told[holder_id] = version
        elif holder is not None:
            self._reached.setdefault(holder_id, _Reach(version, frozenset(numbers)))
        for known in (self._told, self._reached):
            for gone in [holder_id for holder_id in known if not self._holders.knows(holder_id)]:
                del known[gone]

    def says(self, holder_id: str, reached: api.Reached) -> None:
        """A host of a target says what all its workers reach."""
        holder = self._holders.get(holder_id)
        if holder is not None and not holder.is_local:
            numbers = frozenset(map(drive_of_namespace, reached.namespaces))
            self._reached[holder_id] = _Reach(min(reached.drives_version, self.version), numbers)

    def places_of(self, holder_id: str) -> frozenset[int] | None:
        """On which drives the holder may be given places; None: on all, as far as drives take any."""
        holder = self._holders.get(holder_id)
        if holder is None or holder.is_local:
            return None
        reach = self._reached.get(holder_id, _Reach(0, frozenset()))
        return frozenset(number for number in reach.numbers if self._since.get(number, 0) <= reach.version)

    def known_to(
        self, holder_id: str, found: Mapping[bytes, api.ChunkRecord], offered: Collection[int]
    ) -> Mapping[bytes, api.ChunkRecord]:
        """Without what lies on drives that the holder does not reach, or has not heard of: to it, that is a miss.
        ``offered``: the drives of which anything is. Who knows them all gets ``found`` as it is, not taken apart."""
        holder = self._holders.get(holder_id)
        if holder is None:
            return found
        reached = self.places_of(holder_id)
        told = self._told.get(holder_id, self.version)
        unheard = {number for number, since in self._since.items() if since > told}
        if not unheard if reached is None else reached.issuperset(offered):
            return found

        def is_known(shard: api.Shard) -> bool:
            number = drive_of_segment(shard.extent.segment)
            return number not in unheard if reached is None else number in reached

        return {key: chunk for key, chunk in found.items() if all(map(is_known, chunk.shards))}

    def is_known_to_all_here(self, now_s: float) -> bool:
        """To the engines of this machine. One that has fallen silent is not waited for: it is cut off, or it fails to
        write where it cannot."""
        holders = [holder for holder in self._holders if holder.is_local and holder.current]
        asked = [holder for holder in holders if self._holders.state(holder, now_s) == "live"]
        return all(self._told.get(holder.record.holder_id, 0) >= self.version for holder in asked)

    @property
    def has_engines_here(self) -> bool:
        return any(holder.is_local for holder in self._holders)
