"""Which failures say that what was to be read cannot be read: names and codes from the NVMe Base Specification 2.1."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.host.path.flexpath.requests import NoPathError, RequestLateError
from meshfusion.host.path.medium_answers import has_medium_answered
from meshfusion.host.path.pool_data import DriveNotOpenError
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.nvme.command import IoOpcode
from meshfusion.jbof.nvme.queue_effects import CommandDeadlineError, QueueFullError, QueueLostError
from meshfusion.jbof.nvme.status import NvmeCommandError, Status
from meshfusion.jbof.nvme.transfer_effects import PathUnusableError


def answer(sct: int, sc: int) -> NvmeCommandError:
    return NvmeCommandError(Status(sct=sct, sc=sc), IoOpcode.READ, where="target")


def of_file(fault: MediaFault) -> DataFileError:
    return DataFileError(fault, "reading failed", Path("data"))


@pytest.mark.parametrize(
    "error",
    [
        answer(2, 0x81),  # Unrecovered Read Error
        answer(2, 0x82),  # End-to-end Guard Check Error
        answer(0, 0x06),  # Internal Error
        answer(0, 0x80),  # LBA Out of Range
        of_file(MediaFault.IO),
        of_file(MediaFault.SHORT),
    ],
)
def test_the_medium_has_answered(error: MeshFusionError) -> None:
    assert has_medium_answered(error)


@pytest.mark.parametrize(
    "error",
    [
        answer(0, 0x08),  # Command Aborted due to SQ Deletion
        answer(0, 0x0B),  # Invalid Namespace or Format
        answer(0, 0x82),  # Namespace Not Ready
        answer(3, 0x00),  # Internal Path Error
        answer(3, 0x02),  # Asymmetric Access Inaccessible
        of_file(MediaFault.MISSING),
        of_file(MediaFault.READ_ONLY),
        *(
            kind("trouble on the way", next_step="-")
            for kind in (QueueLostError, CommandDeadlineError, QueueFullError, PathUnusableError, NoPathError)
        ),
        RequestLateError("late", next_step="-"),
        DriveNotOpenError("not open", next_step="-"),
        MediaError("a kind that is not known", next_step="-"),
    ],
)
def test_it_has_not(error: MeshFusionError) -> None:
    assert not has_medium_answered(error)
