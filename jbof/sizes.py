"""Sizes as people write them."""

from __future__ import annotations

import re

from meshfusion.jbof.errors import FieldValueError

_UNITS = {"B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)}
_SIZE = re.compile(r"(\d{1,19})(?:\.(\d{1,6}))? ?([A-Za-z]*)", re.ASCII)
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
MAX_SIZE_BYTES = 2**63 - 1


def parse_size_bytes(value: object) -> int:
    """Bytes from an int or a text such as ``4GiB`` (1024-based) or ``4GB`` (1000-based).

    Raises :class:`~meshfusion.jbof.errors.FieldValueError` that says what is wrong with it.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size_bytes = value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            is_negative = _SIZE.fullmatch(value.strip().removeprefix("-").lstrip())
            raise _unfit(value, "is negative, a size is more than 0" if is_negative else "is not a size")
        whole, fraction, unit = match.group(1), match.group(2) or "", match.group(3) or "B"
        factor = _FACTORS.get(unit.lower())
        if factor is None:
            raise _unfit(value, f"has the unknown unit {unit!r}", f"use one of {', '.join(_UNITS)}")
        size_bytes, rest = divmod(int(whole + fraction) * factor, 10 ** len(fraction))
        if rest:
            raise _unfit(value, "is not a whole number of bytes")
    else:
        raise _unfit(value, "is not a size")
    if size_bytes < 0:
        raise _unfit(value, "is negative, a size is more than 0")
    if not 0 < size_bytes <= MAX_SIZE_BYTES:
        raise _unfit(value, "must be less than 8 EiB" if size_bytes else "must be more than 0")
    return size_bytes


def _unfit(value: object, problem: str, fix: str = "write for example 4GiB, 512MiB or a number of bytes") -> ValueError:
    return FieldValueError(problem, fix, subject=repr(value))


def format_size(size_bytes: int) -> str:
    """Exactly ``size_bytes``, in the largest unit that has no fraction: ``4194304`` -> ``4MiB``. Can be parsed back."""
    for power, prefix in reversed(list(enumerate("KMGTP", 1))):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{prefix}iB"
    return str(size_bytes)
