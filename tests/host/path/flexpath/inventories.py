"""What a controller says of its namespaces, for tests that need no controller."""

from __future__ import annotations

from types import MappingProxyType

from meshfusion.jbof.nvme.inventory import Inventory, Namespace
from meshfusion.jbof.nvme.logs import AnaGroup, AnaLog, AnaState
from meshfusion.jbof.nvme.namespaces import LbaFormat, NamespaceIds, NamespaceInfo


def namespace(nsid: int, ids: NamespaceIds, *, lba_bytes: int = 4096) -> Namespace:
    lba_format = LbaFormat(lba_bytes, 0, 0)
    info = NamespaceInfo(
        nsze=1 << 20,
        ncap=1 << 20,
        nuse=0,
        nsfeat=0,
        flbas=0,
        dps=0,
        nmic=1,
        rescap=0,
        dlfeat=0,
        noiob=0,
        hints=None,
        anagrpid=1,
        nsattr=0,
        nguid=ids.nguid or bytes(16),
        eui64=ids.eui64 or bytes(8),
        lba_formats=(lba_format,),
        lba_format=lba_format,
    )
    return Namespace(nsid, info, ids, None)


def inventory_of(nsid: int, nguid: bytes, state: AnaState = AnaState.OPTIMIZED) -> Inventory:
    made = namespace(nsid, NamespaceIds(nguid=nguid))
    return Inventory(MappingProxyType({nsid: made}), AnaLog(1, (AnaGroup(1, state, 1, (nsid,)),)))
