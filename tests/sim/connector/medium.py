"""Where chunks lie: a unit to an LBA, by value."""

from __future__ import annotations

from typing import Final

from meshfusion.dpu.api import types as api
from tests.sim.connector.names import Content

HEADER_LBAS: Final = 1


class Medium:
    def __init__(self) -> None:
        self.units: dict[int, Content] = {}  # by LBA
        self._spare: list[api.Extent] = []
        self._next_lba = 1

    def place(self, unit_count: int) -> api.Extent:
        """A place used before if there is one: who still reads there gets other bytes."""
        lba_count = unit_count + HEADER_LBAS
        for extent in self._spare:
            if extent.lba_count == lba_count:
                self._spare.remove(extent)
                return api.Extent(1, extent.segment, extent.lba, lba_count, extent.generation + 1)
        lba = self._next_lba
        self._next_lba += lba_count
        return api.Extent(1, lba, lba, lba_count, 1)

    def give_back(self, extent: api.Extent) -> None:
        self._spare.append(extent)

    def write(self, extent: api.Extent, units: tuple[Content, ...]) -> None:
        for lba, unit in zip(_unit_lbas(extent), units, strict=True):
            self.units[lba] = unit

    def spoil(self, extent: api.Extent) -> None:
        for lba in _unit_lbas(extent):
            self.units[lba] = ("rotten",) * len(self.units[lba])

    def read(self, extent: api.Extent) -> tuple[Content | None, ...]:
        return tuple(self.units.get(lba) for lba in _unit_lbas(extent))


def _unit_lbas(extent: api.Extent) -> range:
    return range(extent.lba + HEADER_LBAS, extent.lba + extent.lba_count)
