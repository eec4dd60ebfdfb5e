"""NVMe commands that SPDK passes on to a drive: ``bdev_nvme_send_cmd`` (SPDK: doc/jsonrpc.md)."""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final, NamedTuple

from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.command import AdminOpcode, IoOpcode
from meshfusion.jbof.nvme.status import NvmeCommandError, decode_status

_CPL: Final = struct.Struct("<I10xH")  # dword 0, and the status with its phase tag
_TIMEOUT_S: Final = 10.0
assert _CPL.size == 16


class PassedOn(NamedTuple):
    """``result``: dword 0 of the completion."""

    data: bytes
    result: int


def send_command(
    rpc: SpdkRpc,
    name: str,
    opcode: AdminOpcode | IoOpcode,
    sqe: bytes,
    *,
    write: bytes = b"",
    read_bytes: int = 0,
) -> PassedOn:
    """The submission queue entry ``sqe`` to SPDK's controller ``name``; SPDK fills in where the data lies.

    Raises :class:`~meshfusion.jbof.nvme.status.NvmeCommandError` when the drive refuses,
    :class:`~meshfusion.jbof.errors.MediaError` when SPDK does, and
    :class:`~meshfusion.jbof.errors.UnsupportedError` for an answer of a form that is not known.
    """
    assert not (write and read_bytes)
    parameters: dict[str, object] = {"data_len": read_bytes} if read_bytes else {}
    if write:
        parameters = {"data": _encoded(write)}
    try:
        answer = rpc.call(
            "bdev_nvme_send_cmd",
            _TIMEOUT_S,
            name=name,
            cmd_type="io" if isinstance(opcode, IoOpcode) else "admin",
            data_direction="h2c" if write else "c2h",
            cmdbuf=_encoded(sqe),
            **parameters,
        )
    except StepRefusedError as error:
        raise MediaError(f"{name}: {error.message}", next_step=error.next_step) from error
    try:
        result, status = _CPL.unpack(_decoded(answer["cpl"]))
        data = _decoded(answer["data"]) if read_bytes else b""
    except (KeyError, TypeError, struct.error, binascii.Error) as error:
        raise unknown_form(error) from error
    if status >> 1:
        raise NvmeCommandError(decode_status(status), opcode, where=name)
    return PassedOn(data, result)


def unknown_form(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"SPDK reports its drives in a form that is not known: {type(error).__name__} {error}",
        next_step="Run a version of SPDK that this version of MeshFusion was tested with.",
    )


def _encoded(data: bytes) -> str:
    """URL-safe and padded, as SPDK's spdk_base64_urlsafe_decode wants it."""
    return base64.urlsafe_b64encode(data).decode()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text)
