"""Is what paths show under one number one namespace? Pure.

Writing to another one would destroy what it holds, so only an identifier that the target gives to the whole world
(NGUID, UUID or EUI-64) counts, together with the size of a block. Without one, the path that showed it first keeps it.
"""

from __future__ import annotations

from typing import NamedTuple

from meshfusion.jbof.nvme.inventory import Inventory, Namespace
from meshfusion.jbof.nvme.logs import AnaState


class _Known(NamedTuple):
    identity: object
    lba_bytes: int
    first_path: int
    is_unique: bool


class SameNamespaces:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def access(self, path: int, inventory: Inventory) -> dict[int, AnaState]:
        """How ``path`` reaches those that are the same as on the paths asked before; others are left out."""
        access = {}
        for nsid, namespace in inventory.namespaces.items():
            state = inventory.ana_state(nsid)
            if state is not None and namespace.problem is None and self._is_same(path, namespace):
                access[nsid] = state
        return access

    def lba_bytes(self, nsid: int) -> int | None:
        """Of a block; None: no path has shown it."""
        known = self._known.get(nsid)
        return known.lba_bytes if known is not None else None

    def _is_same(self, path: int, namespace: Namespace) -> bool:
        ids = namespace.ids
        is_unique = bool(ids.nguid or ids.uuid or ids.eui64)
        lba_bytes = namespace.info.lba_bytes
        identity = (ids.nguid, ids.uuid, ids.eui64, lba_bytes)
        known = self._known.setdefault(namespace.nsid, _Known(identity, lba_bytes, path, is_unique))
        return identity == known.identity and (known.is_unique or path == known.first_path)
