"""The drives of a pool that a target shows: each is proven, by its label, before anything is read or written there."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from functools import partial

from meshfusion.dpu.api.types import Attachment
from meshfusion.host.path.drive_proof import check_pool
from meshfusion.host.path.namespace_view import APPEAR_S, NamespaceView, SharedInitiator, read_blocks
from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES

logger = logging.getLogger("meshfusion.path")


class ExportedDrives(Collection[int]):
    """The NSIDs of the drives that are what the service says, as they were proven last. They are of one moment to
    whoever asks; :meth:`reach` is called by one thread at a time."""

    def __init__(self, view: NamespaceView) -> None:
        self._view = view
        self._nsids: frozenset[int] = frozenset()
        self._told: dict[int, str] = {}

    @property
    def nsids(self) -> frozenset[int]:
        return self._nsids

    def reach(self, attachment: Attachment) -> None:
        """Prove those that the service names, all of them anew: one may be behind its namespace again that was away.

        One of several that is not what the service said is left out, and that is told; what it holds is computed.
        Raises FormatError, MediaError or UnsupportedError when none is; then nothing has changed. All of them together
        are waited for as long as one would be.
        """
        nsids: set[int] = set()
        errors: list[MeshFusionError] = []
        end_s = time.monotonic() + APPEAR_S
        for namespace in attachment.namespaces:
            nsid = namespace.nsid
            try:
                self._view.add(nsid, appear_s=max(0.0, end_s - time.monotonic()))
                read = partial(_read_block, self._view, nsid)
                check_pool(read, attachment.pool_uuid, nsid, f"namespace {nsid} of the export")
            except (FormatError, MediaError, UnsupportedError) as error:
                self._tell(nsid, error)
                errors.append(error)
            else:
                self._told.pop(nsid, None)
                nsids.add(nsid)
        if not nsids:
            raise errors[0]
        self._nsids = frozenset(nsids)

    def _tell(self, nsid: int, error: MeshFusionError) -> None:
        """Once, though it is tried again and again."""
        if self._told.get(nsid) != error.message:
            logger.error("the pool's drive %d is not reached: %s", nsid - 1, error)
        self._told[nsid] = error.message

    def __contains__(self, nsid: object) -> bool:
        return nsid in self._nsids

    def __iter__(self) -> Iterator[int]:
        return iter(self._nsids)

    def __len__(self) -> int:
        return len(self._nsids)


def open_exported(initiator: SharedInitiator, attachment: Attachment) -> tuple[NamespaceView, ExportedDrives]:
    """A view of the drives that the service names, and those of them that are what it says. Raises as
    :meth:`ExportedDrives.reach` does."""
    view = NamespaceView(initiator, lba_bytes=attachment.namespaces[0].lba_bytes)
    drives = ExportedDrives(view)
    drives.reach(attachment)
    return view, drives


def _read_block(view: NamespaceView, nsid: int, lba: int) -> bytes:
    return read_blocks(view, nsid, lba, LBA_BYTES)
