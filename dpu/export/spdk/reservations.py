"""Reservations of a drive that SPDK has: the commands go through SPDK (``bdev_nvme_send_cmd``).

To the drive, the host is SPDK's process: its host identifier may be a new one with each start, which
:func:`meshfusion.jbof.drives.ownership.take` allows for.
"""

from __future__ import annotations

from typing import Final

from meshfusion.dpu.export.spdk.passthru import send_command
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme import reservations as commands
from meshfusion.jbof.nvme.command import Command, IoOpcode
from meshfusion.jbof.nvme.reservations import (
    KEYS_BYTES,
    RELEASE_BYTES,
    REPORT_BYTES,
    KeyChange,
    ReservationReport,
    ReservationType,
    encode_keys,
    parse_report,
)
from meshfusion.jbof.nvme.sgl import DataPointer, RemoteMemory, remote_data
from meshfusion.jbof.nvme.status import NvmeCommandError

_CONFLICT: Final = (0, 0x83)  # Reservation Conflict (Base Figure 102)
_NO_SUCH_COMMAND: Final = (0, 0x01)
_WRONG_ID_FORMAT: Final = (0, 0x18)  # Host Identifier Inconsistent Format
_PSDT_OFFSET, _DATA_OFFSET, _DATA_BYTES = 1, 24, 16  # SPDK fills these in
_CDW11_OFFSET: Final = 44


class SpdkReservations:
    """:class:`~meshfusion.jbof.drives.reservation.Reservations` of namespace ``nsid`` of SPDK's controller ``name``.

    ``persist``: the drive can keep reservations through a loss of power (bit 0 of RESCAP). ``rpc`` is connected.
    """

    def __init__(self, rpc: SpdkRpc, name: str, nsid: int, *, persist: bool) -> None:
        self._rpc = rpc
        self._name = name
        self._nsid = nsid
        self._persist = persist

    def register(self, key: int) -> None:
        """To a host that is registered under another key, Register is a conflict (Base 8.1.22)."""
        try:
            self._change(KeyChange.REGISTER, 0, key)
        except ReservationConflictError:
            self._change(KeyChange.REPLACE, 0, key)

    def unregister(self, key: int) -> None:
        self._change(KeyChange.UNREGISTER, key, 0)

    def acquire(self, key: int, kind: ReservationType) -> None:
        self._send(commands.acquire(self._nsid, kind, _place(KEYS_BYTES)), encode_keys(key, 0))

    def preempt_and_abort(self, key: int, victim_key: int, kind: ReservationType) -> None:
        self._send(commands.preempt_and_abort(self._nsid, kind, _place(KEYS_BYTES)), encode_keys(key, victim_key))

    def release(self, key: int, kind: ReservationType) -> None:
        self._send(commands.release(self._nsid, kind, _place(RELEASE_BYTES)), key.to_bytes(8, "little"))

    def report(self) -> ReservationReport | None:
        command = commands.report(self._nsid, _place(REPORT_BYTES))
        try:
            return parse_report(self._send(command))
        except NvmeCommandError as error:
            if (error.status.sct, error.status.sc) != _WRONG_ID_FORMAT:
                raise
        short = command.sqe[:_CDW11_OFFSET] + bytes(4) + command.sqe[_CDW11_OFFSET + 4 :]
        return parse_report(self._send(command._replace(sqe=short)), extended=False)

    def _change(self, change: KeyChange, old: int, new: int) -> None:
        command = commands.register(self._nsid, change, _place(KEYS_BYTES), persist=self._persist)
        self._send(command, encode_keys(old, new))

    def _send(self, command: Command, data: bytes = b"") -> bytes:
        """``data`` is sent; without any, a report is read."""
        assert isinstance(command.opcode, IoOpcode)
        sqe = bytearray(command.sqe)
        sqe[_PSDT_OFFSET] = 0
        sqe[_DATA_OFFSET : _DATA_OFFSET + _DATA_BYTES] = bytes(_DATA_BYTES)
        try:
            return send_command(
                self._rpc,
                self._name,
                command.opcode,
                bytes(sqe),
                write=data,
                read_bytes=0 if data else REPORT_BYTES,
            ).data
        except NvmeCommandError as error:
            status = (error.status.sct, error.status.sc)
            if status == _CONFLICT:
                raise ReservationConflictError(error.message, next_step=error.next_step) from error
            if status == _NO_SUCH_COMMAND:
                raise UnsupportedError(
                    f"{self._name} has no reservations: the drive does not know the command",
                    next_step="Use a drive that has them: `mfctl jbof show` tells.",
                ) from error
            raise


def _place(length_bytes: int) -> DataPointer:
    """Where SPDK's own buffer will be put: only its length counts here."""
    return remote_data(RemoteMemory(0, length_bytes, 0))
