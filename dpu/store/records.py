"""How index values are encoded. Every value ends with a CRC-32 over the rest, since LMDB itself checks nothing. How
chunks are: :mod:`~meshfusion.dpu.api.packed_chunk`."""

from __future__ import annotations

import struct
import zlib

from meshfusion.dpu.api.packed_chunk import PackedChunkError, has_its_length, pack_chunk, unpack_chunk
from meshfusion.dpu.api.types import IDENTITY_BYTES, Access, ChunkRecord
from meshfusion.dpu.store.effects import HolderRecord
from meshfusion.jbof.errors import FormatError
from meshfusion.jbof.segments import SegmentRecord

INDEX_VERSION = 2  # 2: segments have a lifetime class and may have summaries

_SEGMENT = struct.Struct("<IQQHB")  # segment generation opened_seq lifetime_class flags
_SUMMARIZED = 1
_HOLDER = struct.Struct(f"<{IDENTITY_BYTES}sQB")
_FENCED, _NVMEOF = 1, 2  # flags of a holder
_CRC = struct.Struct("<I")


def encode_chunk(record: ChunkRecord) -> bytes:
    return pack_chunk(record)


def decode_chunk(value: bytes) -> ChunkRecord:
    """Raises :class:`FormatError` when the value is damaged."""
    try:
        return unpack_chunk(value)
    except PackedChunkError as error:
        raise _damaged("chunk") from error


def chunk_has_its_length(value: bytes) -> bool:
    """Is a value, damaged or not, as long as its fields say? If not, the index's own structure is in doubt."""
    return has_its_length(bytes(value))


def encode_segment(record: SegmentRecord) -> bytes:
    return _sealed(
        _SEGMENT.pack(
            record.segment,
            record.generation,
            record.opened_seq,
            record.lifetime_class,
            _SUMMARIZED * record.is_summarized,
        )
    )


def decode_segment(value: bytes) -> SegmentRecord:
    body = _unsealed(value, "segment")
    if len(body) != _SEGMENT.size:
        raise _damaged("segment")
    segment, generation, opened_seq, lifetime_class, flags = _SEGMENT.unpack(body)
    if flags & ~_SUMMARIZED:
        raise _damaged("segment")
    return SegmentRecord(segment, generation, opened_seq, lifetime_class, bool(flags & _SUMMARIZED))


def encode_holder(record: HolderRecord) -> bytes:
    """With the access of a target a text more: services from before there were any must not take it for local."""
    texts = [record.holder_id, record.engine_kind, record.engine_version, record.host]
    if record.access is Access.NVMEOF:
        texts.append(record.exported_as)
    flags = _FENCED * record.fenced | _NVMEOF * (record.access is Access.NVMEOF)
    return _sealed(_HOLDER.pack(record.identity, record.pid, flags) + "\0".join(texts).encode())


def decode_holder(value: bytes) -> HolderRecord:
    body = _unsealed(value, "holder")
    try:
        identity, pid, flags = _HOLDER.unpack_from(body)
        holder_id, kind, version, host, *exported_as = body[_HOLDER.size :].decode().split("\0")
    except (struct.error, ValueError) as error:
        raise _damaged("holder") from error
    if flags & ~(_FENCED | _NVMEOF) or len(exported_as) != bool(flags & _NVMEOF):
        raise _damaged("holder")
    access = Access.NVMEOF if flags & _NVMEOF else Access.LOCAL
    return HolderRecord(
        holder_id, kind, version, host, pid, identity, bool(flags & _FENCED), access, "".join(exported_as)
    )


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(zlib.crc32(body))


def _unsealed(value: bytes, kind: str) -> bytes:
    body, crc = bytes(value[: -_CRC.size]), bytes(value[-_CRC.size :])
    if len(crc) != _CRC.size or zlib.crc32(body) != _CRC.unpack(crc)[0]:
        raise _damaged(kind)
    return body


def _damaged(kind: str) -> FormatError:
    return FormatError(
        f"a {kind} record of the index is damaged",
        next_step="run `mfctl pool check`; `mfctl pool rebuild-index` makes the index anew from what is on the medium",
    )
