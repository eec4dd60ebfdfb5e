"""What an engine that serves without its cache leaves where `mfctl doctor` looks, as bytes of JSON. Pure."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import Final

from meshfusion.jbof.errors import FormatError


class WhyOff(enum.Enum):
    """What was not known to be right."""

    ENGINE = "engine"
    MEMORY = "memory"
    WORKERS = "workers"
    PATH = "path"


WHY_OFF_TEXT: Final = {
    WhyOff.ENGINE: "its version, model or settings are not served",
    WhyOff.MEMORY: "its KV memory was not proven, or its identity not complete",
    WhyOff.WORKERS: "one of its workers has proven nothing, or differs from the others",
    WhyOff.PATH: "the path that is asked for is impossible",
}


@dataclass(frozen=True, slots=True)
class OffNote:
    """Of one engine process. ``written_s``: by the wall clock."""

    pid: int
    written_s: float
    why: WhyOff
    reason: str
    next_step: str


def note_name(pid: int) -> str:
    return f"off-{pid}.json"


def encode_note(note: OffNote) -> bytes:
    return json.dumps({**asdict(note), "why": note.why.value}).encode()


def decode_note(raw: bytes, where: str) -> OffNote:
    """Members that are not known are left alone. Raises :class:`~meshfusion.jbof.errors.FormatError`."""
    try:
        read = json.loads(raw)
        note = OffNote(read["pid"], read["written_s"], WhyOff(read["why"]), read["reason"], read["next_step"])
        kinds = {int: (note.pid,), int | float: (note.written_s,), str: (note.reason, note.next_step)}
        wrong = [value for kind, values in kinds.items() for value in values if not isinstance(value, kind)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not what it should be")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{where} does not tell of an engine without cache: {error!r}",
            next_step="Use an mfctl of the engine's version, or remove the file.",
        ) from error
    return note
