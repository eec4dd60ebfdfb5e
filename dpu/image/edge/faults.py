"""What an error of the operating system means for a card. Also from the text that a remote shell prints."""

from __future__ import annotations

import errno
import os
from typing import Final

from meshfusion.dpu.image import flash_words as words
from meshfusion.dpu.image.errors import CardError, FaultKind

_KINDS: Final = {
    errno.EBUSY: FaultKind.BUSY,
    errno.EPERM: FaultKind.LOCKED,
    errno.EACCES: FaultKind.DENIED,
    errno.ETIMEDOUT: FaultKind.STALLED,
    errno.ENODEV: FaultKind.GONE,
    errno.ENXIO: FaultKind.GONE,
    errno.ENOENT: FaultKind.GONE,
}
_IN_DROP_MODE: Final = errno.EINVAL
"""What opening boot gives then; of misc it is a key that the driver does not know."""
_NEXT_STEPS: Final = {
    FaultKind.BUSY: "See what else writes to it (fuser -v PATH), let it end, and run the same command again.",
    FaultKind.LOCKED: words.LOCKED[1],
    FaultKind.DENIED: "Run it as root.",
    FaultKind.OWNED_ELSEWHERE: words.OWNED_ELSEWHERE[1],
    FaultKind.STALLED: "The card takes no bytes: look at its console and power, restart the rshim service of its host, "
    "and run the same command again.",
    FaultKind.GONE: "See that the rshim service runs (systemctl status rshim), and which cards it has: ls /dev/rshim*.",
    FaultKind.BROKEN: "Look at the log of the rshim service; then run the same command again.",
}


def card_error(error: OSError, where: str) -> CardError:
    """``where``: file or card, as the operator knows it."""
    return _error(_kind(error.errno or 0, where), where, error.strerror or str(error))


def card_error_from_text(text: str, where: str) -> CardError:
    """Of a program that ended with an error's text, in the locale C, somewhere in what it wrote."""
    found = next((number for number in (*_KINDS, _IN_DROP_MODE) if os.strerror(number) in text), 0)
    said = text.strip().splitlines()[-1] if text.strip() else "failed without a word"
    return _error(_kind(found, where), where, said)


def _kind(number: int, where: str) -> FaultKind:
    if number == _IN_DROP_MODE and "boot" in where:
        return FaultKind.OWNED_ELSEWHERE
    return _KINDS.get(number, FaultKind.BROKEN)


def _error(kind: FaultKind, where: str, said: str) -> CardError:
    return CardError(kind, f"{where}: {said}", next_step=_NEXT_STEPS[kind].replace("PATH", where))
