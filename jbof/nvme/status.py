"""The status of a finished command: decoding, what it means, and the error to raise (Base 4.2.3)."""

from __future__ import annotations

from typing import Final, NamedTuple

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.command import AdminOpcode, FabricsType, Opcode, opcode_words
from meshfusion.jbof.nvme.fields import MAX_U16, check_int
from meshfusion.jbof.nvme.status_codes import SCT_OF, STATUS_CODES, Figure, Retry, StatusCode

_SCT_COMMAND: Final = 1
_SCT_PATH: Final = 3
_SCT_WORDS: Final = ("generic", "command specific", "media and data integrity", "path related")
_FIRST_COMMAND_SET_SC: Final = 0x80  # codes below mean the same for all commands (Base 4.2.3)
_BY_FIGURE: Final = {(code.figure, code.sc): code for code in STATUS_CODES}
_FIGURE_OF_SCT: Final = {sct: figure for figure, sct in SCT_OF.items() if sct != _SCT_COMMAND}


class Status(NamedTuple):
    """Base Figure 100. ``sct`` and ``sc``: status code type and status code.

    ``crd`` selects a retry delay of the Identify Controller data and holds only if the host enabled that.
    """

    sct: int
    sc: int
    crd: int = 0
    more: bool = False
    dnr: bool = False

    @property
    def is_success(self) -> bool:
        return self.sct == 0 and self.sc == 0


_SUCCESS: Final = Status(0, 0)


def decode_status(field: int) -> Status:
    """From the 16 bits in a completion or in an error log entry, whose lowest one (the phase tag) is dropped."""
    if field in (0, 1):
        return _SUCCESS
    check_int("status field", field, 0, MAX_U16)
    return Status(
        sct=field >> 9 & 0x7,
        sc=field >> 1 & 0xFF,
        crd=field >> 12 & 0x3,
        more=bool(field >> 14 & 1),
        dnr=bool(field >> 15 & 1),
    )


def known_code(status: Status, opcode: Opcode) -> StatusCode | None:
    """What the specification says of this status for this command; None for codes we do not know."""
    for figure in _figures(status, opcode):
        if code := _BY_FIGURE.get((figure, status.sc)):
            return code
    return None


def is_path_error(status: Status) -> bool:
    """Is it this path that failed, so that another one to the same namespace may work? (Base 4.2.3.4)"""
    return status.sct == _SCT_PATH


def is_retryable(status: Status, opcode: Opcode) -> bool:
    """May the same command succeed when sent again, here or on another path?

    Never with the Do Not Retry bit; otherwise as the code says, and yes for a code that we do not know (Base Figure
    100). A write that is sent again must still be wanted: see rule 3 of the design.
    """
    if status.is_success or status.dnr:
        return False
    code = known_code(status, opcode)
    return code is None or code.retry is not Retry.NO


def status_words(status: Status, opcode: Opcode) -> str:
    """For people: ``LBA Out of Range: the namespace ends before these blocks (sct 0h, sc 80h, do not retry)``."""
    code = known_code(status, opcode)
    if code is not None:
        words = f"{code.name}: {code.meaning}"
    elif status.sct < len(_SCT_WORDS):
        words = f"unknown {_SCT_WORDS[status.sct]} status"
    else:
        words = "vendor specific status"
    numbers = f"sct {status.sct:X}h, sc {status.sc:02X}h"
    return f"{words} ({numbers}{', do not retry' if status.dnr else ''})"


class NvmeCommandError(MediaError):
    """A command completed with an error. ``status`` and ``opcode`` are for programs, the message is for people.

    ``where`` names target, queue or namespace; ``detail`` adds what the caller knows, such as the blocks.
    """

    def __init__(self, status: Status, opcode: Opcode, *, where: str, detail: str = "") -> None:
        assert not status.is_success
        code = known_code(status, opcode)
        super().__init__(
            f"{where}: NVMe command {opcode_words(opcode)} failed{f' at {detail}' if detail else ''}: "
            f"{status_words(status, opcode)}",
            next_step="Look at the target's log for the cause." if code is None else code.next_step,
        )
        self.status = status
        self.opcode = opcode


def _figures(status: Status, opcode: Opcode) -> tuple[Figure, ...]:
    if status.sct != _SCT_COMMAND:
        return (_FIGURE_OF_SCT[status.sct],) if status.sct in _FIGURE_OF_SCT else ()
    if status.sc < _FIRST_COMMAND_SET_SC:
        return (Figure.COMMAND,)
    if isinstance(opcode, FabricsType | AdminOpcode):
        return (Figure.FABRICS,)
    # 91h, authentication is required, comes for any command.
    return (Figure.IO_COMMAND, Figure.FABRICS)
