"""Is what is read the drive of the pool that the service spoke of? Asked before a drive is used, on whatever path."""

from __future__ import annotations

from collections.abc import Callable

from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.format import LABEL_LBAS
from meshfusion.jbof.label import decode_label_copies
from meshfusion.jbof.pool_addresses import namespace_of


def check_pool(read: Callable[[int], bytes], pool_uuid: str, nsid: int, where: str) -> None:
    """``read``: a block of the data. Raises :class:`~meshfusion.jbof.errors.FormatError` when it is another pool's."""
    label = decode_label_copies([read(lba) for lba in LABEL_LBAS], where=where)
    if label.pool_uuid.hex() != pool_uuid.replace("-", ""):
        raise FormatError(
            f"{where} is pool {label.pool_uuid.hex()}, the service speaks of {pool_uuid}",
            next_step="run the engine on the service's machine, or correct the service's exports",
        )
    if namespace_of(label.drive_number) != nsid:
        raise FormatError(
            f"{where} is drive {label.drive_number} of the pool, the service speaks of drive {nsid - 1}",
            next_step="run the engine on the service's machine, or restart the service",
        )
