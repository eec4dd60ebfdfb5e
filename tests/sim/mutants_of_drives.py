"""Planted bugs in how drives come to hosts of a target and go from them. As in :mod:`tests.sim.mutants`, the simulation
must find every one, with several drives."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshfusion.dpu.api import types as api
from meshfusion.dpu.drive_reach import DriveReach
from meshfusion.dpu.export.fence import Confirmed, Fence
from tests.sim.service import Rules
from tests.sim.target import NvmetOfModel, SpdkOfModel


class _PlacesAnywhere(DriveReach):
    """On whatever drive has room."""

    def places_of(self, holder_id: str) -> frozenset[int] | None:
        return None

    def known_to(
        self, holder_id: str, found: Mapping[bytes, api.ChunkRecord], offered: Collection[int]
    ) -> Mapping[bytes, api.ChunkRecord]:
        true = DriveReach(self._holders)
        vars(true).update(vars(self))
        return true.known_to(holder_id, found, offered)


class _OffersAll(DriveReach):
    def known_to(
        self, holder_id: str, found: Mapping[bytes, api.ChunkRecord], offered: Collection[int]
    ) -> Mapping[bytes, api.ChunkRecord]:
        return found


class _BelievesOldReports(DriveReach):
    """A drive that was gone and is back is reached as it was before."""

    def says(self, holder_id: str, reached: api.Reached) -> None:
        super().says(holder_id, api.Reached(self.version, reached.namespaces))


class _TellsIsProof(DriveReach):
    """Who was told of drives has opened them, has it not?"""

    def told(self, holder_id: str, version: int, numbers: object) -> None:
        self._reached.pop(holder_id, None)
        super().told(holder_id, version, numbers)  # type: ignore[arg-type]


class _TakesTheRequestForTheEnd:
    """What the target was asked is done, is it not?"""

    def withdraw(self, nsid: int, backing: str) -> Fence:
        return Confirmed()


class HastySpdk(_TakesTheRequestForTheEnd, SpdkOfModel):
    pass


class HastyNvmet(_TakesTheRequestForTheEnd, NvmetOfModel):
    pass


MUTANTS_OF_DRIVES: Mapping[str, Rules] = {
    "grants places on drives that a host does not reach": Rules(reach=_PlacesAnywhere),
    "offers what lies on drives that a host does not reach": Rules(reach=_OffersAll),
    "believes what a host said before a drive was gone": Rules(reach=_BelievesOldReports),
    "takes what a host was told for what it reaches": Rules(reach=_TellsIsProof),
    "removes a drive before the target has confirmed it": Rules(waits_for_target=False),
    "does not wait until a namespace is at rest": Rules(spdk=HastySpdk, nvmet=HastyNvmet),
}
