"""Most that hosts read from and write to a bdev in a second. SPDK queues what comes above (lib/bdev/bdev.c)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.jbof.errors import UnsupportedError

UNIT_BYTES: Final = 1 << 20
"""SPDK takes whole ones (SPDK_BDEV_QOS_MIN_BYTES_PER_SEC)."""

_CALL_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Whole ``UNIT_BYTES``; None: no limit. One that is not configured is taken away."""

    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        for limit in (self.read_bytes_per_s, self.write_bytes_per_s):
            assert limit is None or (limit > 0 and limit % UNIT_BYTES == 0), limit

    def parameters(self) -> dict[str, int]:
        """In SPDK's words, where 0 is no limit."""
        return {
            "r_mbytes_per_sec": (self.read_bytes_per_s or 0) // UNIT_BYTES,
            "w_mbytes_per_sec": (self.write_bytes_per_s or 0) // UNIT_BYTES,
        }


def keep_limits(rpc: SpdkRpc, bdevs: Iterable[str], limits: RateLimits) -> None:
    """Of each of them. Idempotent; what is as it should be is left alone. Raises what the calls raise, and
    :class:`~meshfusion.jbof.errors.UnsupportedError` for an answer of another form."""
    wanted = limits.parameters()
    for bdev in bdevs:
        if _assigned(rpc.call("bdev_get_bdevs", _CALL_S, name=bdev), wanted) != wanted:
            rpc.call("bdev_set_qos_limit", _CALL_S, name=bdev, **wanted)


def _assigned(answer: Any, names: Iterable[str]) -> dict[str, int]:
    try:
        (report,) = answer
        return {name: int(report["assigned_rate_limits"][name]) for name in names}
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"SPDK reports a bdev's limits in a form that is not known: {type(error).__name__} {error}",
            next_step="run a version of SPDK that this version of MeshFusion was tested with, or remove limits",
        ) from error
