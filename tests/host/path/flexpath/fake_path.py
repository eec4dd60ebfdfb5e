"""Paths to one namespace in memory, as their initiators show them, with faults at will."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshfusion.host.path.flexpath.link import OnEvent, PathSpec
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.controller_effects import (
    Connected,
    ConnectionLost,
    ControllerLost,
    InventoryChanged,
)
from meshfusion.jbof.nvme.inventory import Inventory
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange, MemoryRange
from meshfusion.jbof.nvme.sgl import RemoteMemory
from tests.host.path.flexpath.inventories import inventory_of
from tests.host.support.memory_namespace import NSID, MemoryNamespace, gone

NGUID = b"n" * 16


@dataclass
class FakePath(MemoryNamespace):
    """One initiator. It gives out keys of its own, and takes only these."""

    inventory: Inventory = field(default_factory=lambda: inventory_of(NSID, NGUID))
    on_event: OnEvent = lambda event: None
    first_key: int = 0
    takes_dma_bufs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next_key = self.first_key
        self.keys: set[int] = set()
        self.host_keys: list[Secret] = []

    def register_address(self, address: int, length_bytes: int, *, writable: bool, owner: object) -> RegisteredRegion:
        return self.new_region(AddressRange(address, length_bytes), owner)

    def use_key(self, host_key: Secret) -> None:
        self.host_keys.append(host_key)

    def register_dma_buf(self, memory: DmaBufRange, *, writable: bool, owner: object) -> RegisteredRegion:
        if not self.takes_dma_bufs:
            return super().register_dma_buf(memory, writable=writable, owner=owner)
        return self.new_region(memory, owner)

    def new_region(self, memory: MemoryRange, owner: object) -> RegisteredRegion:
        self._next_key += 1
        key = self._next_key
        self.keys.add(key)
        remote = RemoteMemory(memory.first_iova, memory.length_bytes, key)
        self.regions.append(RegisteredRegion(remote, owner, lambda: self.keys.discard(key)))
        return self.regions[-1]

    def _begin(self, what: str, nsid: int, lba: int, memory: Any, timeout_s: float) -> Any:
        assert {part.remote.rkey for part in memory} <= self.keys, "memory of another path"
        return super()._begin(what, nsid, lba, memory, timeout_s)

    # ---- what happens to it --------------------------------------------------------------------------------------

    def lose(self, *, free_memory: bool = True) -> None:
        """Its connection: what is held is in doubt, and what is begun from now on was not sent."""
        held, self.held = self.held, [] if free_memory else self.held
        self.is_retryable = True
        self.inventory, self.error = Inventory(), gone()
        for one in held:
            one.pending.doubt(gone())
        self.on_event(ConnectionLost(gone()))
        if free_memory:
            for one in held:
                one.pending.free_memory()

    def come_back(self) -> None:
        self.inventory, self.error, self.is_retryable = inventory_of(NSID, NGUID), None, False
        self.on_event(Connected(None))  # type: ignore[arg-type]

    def give_up(self) -> None:
        self.lose()
        self.on_event(ControllerLost(gone()))

    def set_access(self, state: AnaState) -> None:
        self.inventory = inventory_of(NSID, NGUID, state)
        self.on_event(InventoryChanged(frozenset({NSID}), self.inventory))


class Fabric:
    """Opens paths to one medium of ``capacity_bytes``. ``closed``: those that cannot be opened."""

    def __init__(self, count: int, capacity_bytes: int = 1 << 20, **options: Any) -> None:
        self.medium = bytearray(capacity_bytes)
        self.opened: list[list[FakePath]] = [[] for _ in range(count)]
        self.closed: set[int] = set()
        self.options: list[dict[str, Any]] = [dict(options) for _ in range(count)]

    def specs(self) -> list[PathSpec]:
        return [PathSpec(f"p{number}", self._opener(number)) for number in range(len(self.opened))]

    def path(self, number: int) -> FakePath:
        return self.opened[number][-1]

    def _opener(self, number: int) -> Callable[[OnEvent], FakePath]:
        def open_path(on_event: OnEvent) -> FakePath:
            if number in self.closed:
                raise MediaError(f"p{number} does not answer", next_step="look at it")
            first_key = 1000 * number + 100 * len(self.opened[number])
            path = FakePath(0, on_event=on_event, first_key=first_key, **self.options[number])
            path.medium = self.medium
            self.opened[number].append(path)
            return path

        return open_path

    @property
    def log(self) -> list[tuple[int, str, int]]:
        return [(n, what, lba) for n, paths in enumerate(self.opened) for path in paths for what, lba in path.log]


def bytes_at(address: int, length_bytes: int) -> bytes:
    return ctypes.string_at(address, length_bytes)


__all__ = ["NGUID", "NSID", "Fabric", "FakePath", "MeshFusionError", "bytes_at"]
