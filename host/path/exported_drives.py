"""The drives of a pool that a target shows: each is proven, by its label, before anything is read or written there."""

from __future__ import annotations

import logging
import time
from functools import partial

from meshfusion.dpu.api.types import Attachment
from meshfusion.host.path.drive_proof import check_pool
from meshfusion.host.path.namespace_view import APPEAR_S, NamespaceView, SharedInitiator, read_blocks
from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES

logger = logging.getLogger("meshfusion.path")


def open_exported(initiator: SharedInitiator, attachment: Attachment) -> tuple[NamespaceView, frozenset[int]]:
    """A view of the drives that the service names, and the NSIDs of those that are what it says.

    One of several that is not is left out, and that is told: what it holds is computed. Raises FormatError, MediaError
    or UnsupportedError when none is. All of them together are waited for as long as one would be.
    """
    view = NamespaceView(initiator, lba_bytes=attachment.namespaces[0].lba_bytes)
    nsids: set[int] = set()
    errors: list[MeshFusionError] = []
    end_s = time.monotonic() + APPEAR_S
    for namespace in attachment.namespaces:
        nsid = namespace.nsid
        try:
            view.add(nsid, appear_s=max(0.0, end_s - time.monotonic()))
            check_pool(partial(_read_block, view, nsid), attachment.pool_uuid, nsid, f"namespace {nsid} of the export")
        except (FormatError, MediaError, UnsupportedError) as error:
            logger.error("the pool's drive %d is not reached: %s", nsid - 1, error)
            errors.append(error)
        else:
            nsids.add(nsid)
    if not nsids:
        raise errors[0]
    return view, frozenset(nsids)


def _read_block(view: NamespaceView, nsid: int, lba: int) -> bytes:
    return read_blocks(view, nsid, lba, LBA_BYTES)
