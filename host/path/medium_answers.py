"""Does a failure to read say anything of the bytes that were to be read? No I/O."""

from __future__ import annotations

from typing import Final

from meshfusion.host.path.load_job import UnitFailure
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.nvme.status import NvmeCommandError, Status

_FAULTS: Final = frozenset({MediaFault.IO, MediaFault.SHORT})
_GENERIC, _MEDIA = 0, 2  # status code types (Base Figure 101)
# Internal Error, which targets answer when their block device fails (SPDK: lib/nvmf/ctrlr_bdev.c, Linux:
# errno_to_nvme_status in drivers/nvme/target/core.c), and LBA Out of Range (Base Figure 102).
_GENERIC_CODES: Final = frozenset({0x06, 0x80})


def failure_of(index: int, error: MeshFusionError) -> UnitFailure:
    """Of the unit of this ``index`` in its job, which could not be read."""
    return UnitFailure(index, False, error.message, is_untried=not has_medium_answered(error))


def has_medium_answered(error: MeshFusionError) -> bool:
    """Is it the medium that could not read this, by its own word?

    All else leaves open what lies there: a connection that was lost, an answer that did not come in time, a path that
    does not reach the drive, a drive that is not open here. Only named errors count, so that a new kind of trouble on
    the way costs no chunk.
    """
    match error:
        case NvmeCommandError(status=status):
            return _is_of_medium(status)
        case DataFileError(fault=fault):
            return fault in _FAULTS
        case _:
            return False


def _is_of_medium(status: Status) -> bool:
    return status.sct == _MEDIA or (status.sct == _GENERIC and status.sc in _GENERIC_CODES)
