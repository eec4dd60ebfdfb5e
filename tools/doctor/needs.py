"""What a service's configuration needs of its machine: without one nothing is known to be needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServiceConfig


@dataclass(frozen=True, slots=True)
class Needs:
    """``modules``: of the kernel, by name. ``hugepages_bytes``: what nvmf_tgt was promised."""

    modules: frozenset[str] = frozenset()
    hugepages_bytes: int = 0


def needs_of(config: ServiceConfig | None) -> Needs:
    if config is None:
        return Needs()
    modules: set[str] = set()
    hugepages_bytes = 0
    for served in config.served:
        exports = served.exports
        if served.pool.encryption is not None:
            modules.add("dm_crypt")
        if exports is None:
            continue
        transports = {portal.partition("://")[0] for portal in exports.portals}
        if exports.target == "nvmet":
            modules |= {"nvmet", *(f"nvmet_{transport}" for transport in transports)}
        if "rdma" in transports:
            modules |= {"ib_uverbs", "rdma_ucm"}
        if exports.spdk is not None:
            hugepages_bytes = max(hugepages_bytes, exports.spdk.memory)
    return Needs(frozenset(modules), hugepages_bytes)
