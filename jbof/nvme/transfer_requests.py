"""What can be asked of a namespace, and the commands that do it.

Raised for a request that cannot be expressed, or that a controller cannot do:
:class:`~meshfusion.jbof.nvme.fields.NvmeFieldError`, :class:`~meshfusion.jbof.errors.UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.bring_up import AssociationInfo
from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.deallocation import split_ranges
from meshfusion.jbof.nvme.inventory import Namespace
from meshfusion.jbof.nvme.io_commands import LbaRange, encode_ranges, flush, read, write
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.sgl import DataPointer, RemoteMemory, remote_data, remote_data_list, window_data
from meshfusion.jbof.nvme.split import TransferLimits, TransferPart, split_transfer


class RangeList(NamedTuple):
    """Of a Dataset Management command, which is built when there is memory for the list."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Whole blocks from ``lba`` on, as many as ``memory`` holds."""

    nsid: int
    lba: int
    memory: Sequence[RemoteMemory]

    def commands(self, info: AssociationInfo, namespace: Namespace, key_scope: KeyScope) -> Iterable[Command]:
        for part in _parts(self.lba, self.memory, info, namespace, key_scope):
            yield read(self.nsid, part.lba, part.lba_count, _data(part, key_scope))


@dataclass(frozen=True, slots=True)
class Write:
    """Like :class:`Read`. With ``force_unit_access`` it is durable when it is done. It goes where chunks do:
    :meth:`~meshfusion.jbof.nvme.bring_up.AssociationInfo.data_placement`."""

    nsid: int
    lba: int
    memory: Sequence[RemoteMemory]
    force_unit_access: bool

    def commands(self, info: AssociationInfo, namespace: Namespace, key_scope: KeyScope) -> Iterable[Command]:
        for part in _parts(self.lba, self.memory, info, namespace, key_scope):
            yield write(
                self.nsid,
                part.lba,
                part.lba_count,
                _data(part, key_scope),
                force_unit_access=self.force_unit_access,
                placement_id=info.data_placement(self.nsid),
            )


@dataclass(frozen=True, slots=True)
class Flush:
    """Make durable what was done in the namespace before."""

    nsid: int

    def commands(self, info: AssociationInfo, namespace: Namespace, key_scope: KeyScope) -> Iterable[Command]:
        yield flush(self.nsid)


@dataclass(frozen=True, slots=True)
class Deallocate:
    """The blocks' content is not needed any more. The controller may keep it nevertheless."""

    nsid: int
    ranges: tuple[LbaRange, ...]

    def commands(self, info: AssociationInfo, namespace: Namespace, key_scope: KeyScope) -> Iterable[RangeList]:
        if not info.controller.has_dataset_management:
            raise UnsupportedError(
                "the controller has no Dataset Management (ONCS bit 2)",
                next_step="Use a target that can deallocate, so that the flash below it lasts.",
            )
        # An empty list is refused like any other that cannot be encoded.
        return [RangeList(encode_ranges(part)) for part in split_ranges(self.ranges, info.limits) or ((),)]


@dataclass(frozen=True, slots=True)
class Reserve:
    """A command about the namespace's reservation, made by ``build`` of where its data lies: ``memory``, one piece."""

    nsid: int
    memory: Sequence[RemoteMemory]
    build: Callable[[DataPointer], Command]

    def commands(self, info: AssociationInfo, namespace: Namespace, key_scope: KeyScope) -> Iterable[Command]:
        if not info.controller.has_reservations or not namespace.info.rescap:
            raise UnsupportedError(
                f"namespace {self.nsid} has no reservations (ONCS bit 5, RESCAP)",
                next_step="Use a target that has them: Linux' from 6.13 on with resv_enable, or SPDK's.",
            )
        (memory,) = self.memory
        yield self.build(window_data(memory) if key_scope is KeyScope.COMMAND else remote_data(memory))


Request = Read | Write | Flush | Deallocate | Reserve


def _parts(
    lba: int, memory: Sequence[RemoteMemory], info: AssociationInfo, namespace: Namespace, key_scope: KeyScope
) -> Iterable[TransferPart]:
    lba_bytes = namespace.info.lba_bytes
    limits = TransferLimits(lba_bytes, info.max_transfer_bytes, max_pieces(info, key_scope))
    length_bytes = sum(piece.length_bytes for piece in memory)
    # A remainder makes the lengths differ, which is refused with the numbers.
    return split_transfer(lba, max(1, length_bytes // lba_bytes), memory, limits)


def max_pieces(info: AssociationInfo, key_scope: KeyScope) -> int:
    """Of memory, in one command. A command has one window, for targets invalidate one key with a response."""
    return 1 if key_scope is KeyScope.COMMAND else info.controller.max_sgl_descriptors


def _data(part: TransferPart, key_scope: KeyScope) -> DataPointer:
    if key_scope is KeyScope.REGION:
        return remote_data_list(part.memory)
    (memory,) = part.memory
    return window_data(memory)
