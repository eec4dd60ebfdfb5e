"""What is known of a write to a file or block device that failed (rule 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshfusion.host.path.medium import WriteInDoubtError
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import DataFile


@contextmanager
def fate_of_write(data: DataFile) -> Iterator[None]:
    """Around a write to ``data``. Raises :class:`~meshfusion.host.path.medium.WriteInDoubtError` for one that failed
    and may be done later.

    When the kernel's call has returned, a drive of this machine has nothing under way. But behind the kernel's NVMe-oF
    initiator an error says only that the kernel waits no longer: the target may have the command, and do it.
    """
    try:
        yield
    except DataFileError as error:
        if not data.fabrics or error.fault is MediaFault.SHORT:  # SHORT: it was not begun
            raise
        controllers = ", ".join(link.controller for link in data.fabrics)
        raise WriteInDoubtError(
            f"{error.message}; over {controllers} it may still be done", next_step=error.next_step
        ) from error
