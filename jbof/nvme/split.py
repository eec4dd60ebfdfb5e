"""One transfer into as many commands as a controller's limits make of it.

A transfer is a run of logical blocks and, in order, the pieces of memory that hold them. A command covers whole
blocks; its memory may begin and end anywhere within the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.fields import MAX_U64, check_int, field_error
from meshfusion.jbof.nvme.io_commands import MAX_COMMAND_LBAS
from meshfusion.jbof.nvme.sgl import MAX_KEYED_BYTES, MAX_LIST_DESCRIPTORS, RemoteMemory


class TransferLimits(NamedTuple):
    """``lba_bytes`` of the namespace, ``max_transfer_bytes`` of its controller (None: no limit).

    ``max_descriptors``: pieces of memory that one command may have, 1 for a controller that takes no list.
    """

    lba_bytes: int
    max_transfer_bytes: int | None
    max_descriptors: int = 1

    @property
    def max_command_bytes(self) -> int:
        """The most that one command can move, in whole blocks."""
        limit = MAX_COMMAND_LBAS * self.lba_bytes
        if self.max_transfer_bytes is not None:
            limit = min(limit, self.max_transfer_bytes)
        return limit - limit % self.lba_bytes

    @property
    def max_piece_bytes(self) -> int:
        """The most that one descriptor can hold, in whole blocks so that what follows it stays aligned."""
        return MAX_KEYED_BYTES - MAX_KEYED_BYTES % self.lba_bytes


class TransferPart(NamedTuple):
    """One command: ``lba_count`` blocks from ``lba``, and their memory."""

    lba: int
    lba_count: int
    memory: tuple[RemoteMemory, ...]


def split_transfer(
    lba: int, lba_count: int, memory: Sequence[RemoteMemory], limits: TransferLimits
) -> tuple[TransferPart, ...]:
    """The commands, in order: every byte of ``memory`` exactly once, at its place.

    Pieces that continue each other under the same key count as one. Raises
    :class:`~meshfusion.jbof.nvme.fields.NvmeFieldError` if the pieces are not ``lba_count`` blocks long together, and
    :class:`~meshfusion.jbof.errors.UnsupportedError` if the controller cannot take a block whose memory is scattered
    that much.
    """
    check_int("SLBA", lba, 0, MAX_U64)
    check_int("number of blocks", lba_count, 1, MAX_U64 + 1 - lba)
    check_int("lba_bytes", limits.lba_bytes, 1, MAX_KEYED_BYTES)
    check_int("max_descriptors", limits.max_descriptors, 1, MAX_LIST_DESCRIPTORS)
    length_bytes = sum(piece.length_bytes for piece in memory)
    if length_bytes != lba_count * limits.lba_bytes or any(piece.length_bytes < 1 for piece in memory):
        raise field_error(
            "data length", f"is {length_bytes} bytes; {lba_count} blocks have {lba_count * limits.lba_bytes}"
        )
    if len(memory) == 1 and length_bytes <= min(limits.max_command_bytes, limits.max_piece_bytes):
        return (TransferPart(lba, lba_count, (memory[0],)),)
    parts = []
    for part_memory in _portions(_joined(memory), limits):
        part_lbas = sum(piece.length_bytes for piece in part_memory) // limits.lba_bytes
        parts.append(TransferPart(lba, part_lbas, part_memory))
        lba += part_lbas
    return tuple(parts)


def _joined(memory: Sequence[RemoteMemory]) -> list[RemoteMemory]:
    joined: list[RemoteMemory] = []
    for piece in memory:
        last = joined[-1] if joined else None
        if last is not None and last.rkey == piece.rkey and last.address + last.length_bytes == piece.address:
            joined[-1] = RemoteMemory(last.address, last.length_bytes + piece.length_bytes, last.rkey)
        else:
            joined.append(piece)
    return joined


def _portions(memory: Sequence[RemoteMemory], limits: TransferLimits) -> list[tuple[RemoteMemory, ...]]:
    """The memory of each command: as much as fits, cut back to whole blocks."""
    if limits.max_command_bytes == 0:
        raise UnsupportedError(
            f"the controller moves at most {limits.max_transfer_bytes} bytes in a command, less than one logical block "
            f"of {limits.lba_bytes}",
            next_step="Raise the target's maximum I/O size to at least one block, better to 1 MiB.",
        )
    portions = []
    index, offset_bytes = 0, 0  # where the next command begins
    while index < len(memory):
        taken = _take(memory, index, offset_bytes, limits)
        length_bytes = sum(piece.length_bytes for piece in taken)
        length_bytes -= length_bytes % limits.lba_bytes
        if length_bytes == 0:
            raise UnsupportedError(
                f"a logical block of {limits.lba_bytes} bytes lies in more than {limits.max_descriptors} pieces of "
                "memory, and the controller takes no longer list",
                next_step="Let pieces of memory end at block boundaries, or use a target that takes SGL lists (SPDK).",
            )
        portions.append(_first(taken, length_bytes))
        offset_bytes += length_bytes
        while index < len(memory) and offset_bytes >= memory[index].length_bytes:
            offset_bytes -= memory[index].length_bytes
            index += 1
    return portions


def _take(memory: Sequence[RemoteMemory], index: int, offset_bytes: int, limits: TransferLimits) -> list[RemoteMemory]:
    """From there on, whatever the bounds of one command allow, block boundaries not yet heeded."""
    taken: list[RemoteMemory] = []
    room_bytes = limits.max_command_bytes
    while index < len(memory) and room_bytes and len(taken) < limits.max_descriptors:
        piece = memory[index]
        length_bytes = min(piece.length_bytes - offset_bytes, room_bytes, limits.max_piece_bytes)
        taken.append(piece.part(offset_bytes, length_bytes))
        room_bytes -= length_bytes
        offset_bytes += length_bytes
        if offset_bytes == piece.length_bytes:
            index, offset_bytes = index + 1, 0
    return taken


def _first(pieces: Sequence[RemoteMemory], length_bytes: int) -> tuple[RemoteMemory, ...]:
    """The first ``length_bytes`` of ``pieces``."""
    kept = []
    for piece in pieces:
        if length_bytes == 0:
            break
        part = piece.part(0, min(piece.length_bytes, length_bytes))
        kept.append(part)
        length_bytes -= part.length_bytes
    return tuple(kept)
