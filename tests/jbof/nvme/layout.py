"""Bytes by hand: how the tests read and write NVMe structures, independently of the code under test.

Vectors written out in the tests carry the figure whose layout they follow. Those of commands, completions, Identify
data, logs and connection data were computed by a C program from the structure definitions of SPDK 26.09 (nvme_spec.h,
nvmf_spec.h); no line of it is here.
"""

from __future__ import annotations

from typing import NamedTuple

from meshfusion.jbof.nvme.command import Command

NULL_SGL = "00000000 00000000 000000 00000000 40"


class Descriptor(NamedTuple):
    address: int
    length_bytes: int
    key: int
    identifier: int


def le(data: bytes, offset: int, size: int) -> int:
    """The little-endian number of ``size`` bytes at ``offset``."""
    assert offset + size <= len(data)
    return int.from_bytes(data[offset : offset + size], "little")


def descriptor(data: bytes, offset: int = 24) -> Descriptor:
    """A keyed descriptor (Base Figure 122); SGL Entry 1 of a command lies at byte 24."""
    return Descriptor(le(data, offset, 8), le(data, offset + 8, 3), le(data, offset + 11, 4), data[offset + 15])


def dword(command: Command, number: int) -> int:
    """Command Dword ``number`` (Base Figure 92)."""
    return le(command.sqe, 4 * number, 4)


def filled(length_bytes: int, parts: dict[int, str]) -> bytes:
    """Zeros, but for the given hexadecimal bytes at their offsets."""
    data = bytearray(length_bytes)
    for offset, text in parts.items():
        value = bytes.fromhex(text)
        data[offset : offset + len(value)] = value
    assert len(data) == length_bytes
    return bytes(data)
