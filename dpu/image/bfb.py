"""The BlueField boot stream (BFB): reading, checking and making it. Little endian; no I/O but reading a given file.

A stream is a row of images. Each has a header of 24 bytes, its bytes, and zeros up to a multiple of 8:

====== ========================================================================================================
bits   first word: 0-31 magic 0x13026642 ("Bf", 02, 13), 32-35 major version (1), 36-39 minor version (2),
       44-47 hardware version of the next image with this id (0: none), 48-51 hardware version of this image,
       52-55 length of the header in words of 8 bytes (3), 56-63 image id
bits   second word: 0-31 length of the image in bytes, 32-63 CRC-32 of the image and the zeros behind it
bits   third word: one for each image id that comes later in the stream
====== ========================================================================================================

Source: ``mlx-mkbfb`` of github.com/Mellanox/rshim-user-space. The hardware version is 0 for BlueField-1, 1 for
BlueField-2, 2 for BlueField-3; images that all chips share have 0.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from meshfusion.dpu.image.errors import BfbError

MAGIC: Final = 0x13026642
HEADER_BYTES: Final = 24
ALIGNMENT_BYTES: Final = 8
MAX_IMAGE_ID: Final = 63  # the bitmap of following images has one bit for each
BL2_IMAGE_ID: Final = 1
"""The first firmware that every chip loads from the stream, so that it exists once for each chip it is made for."""
HARDWARE_VERSIONS: Final = {"BlueField-1": 0, "BlueField-2": 1, "BlueField-3": 2}

_HEADER: Final = struct.Struct("<QQQ")
_MAJOR: Final = 1
_MINOR: Final = 2
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class BfbImage:
    """``version``: of the hardware."""

    image_id: int
    version: int
    data: bytes


@dataclass(frozen=True, slots=True)
class BfbPart:
    """Where an image lies: ``offset_bytes`` is that of its header."""

    image_id: int
    version: int
    offset_bytes: int
    length_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class BfbSummary:
    """Of a stream whose every checksum was right. ``sha256``: of the whole file, in hex."""

    parts: tuple[BfbPart, ...]
    size_bytes: int
    sha256: str

    @property
    def chip_families(self) -> frozenset[str]:
        """The chips it has first firmware for."""
        made_for = {part.version for part in self.parts if part.image_id == BL2_IMAGE_ID}
        return frozenset(family for family, version in HARDWARE_VERSIONS.items() if version in made_for)


def make_bfb(images: Sequence[BfbImage]) -> bytes:
    """The stream of ``images``, in their order."""
    pieces = []
    for index, image in enumerate(images):
        later = images[index + 1 :]
        next_version = next((other.version for other in later if other.image_id == image.image_id), 0)
        following = sum({1 << other.image_id for other in later})
        padding = bytes(-len(image.data) % ALIGNMENT_BYTES)
        crc32 = zlib.crc32(padding, zlib.crc32(image.data))
        pieces += [_header(image, next_version, crc32, following), image.data, padding]
    return b"".join(pieces)


def parse_bfb(data: bytes) -> tuple[BfbImage, ...]:
    """The images in ``data``. Raises :class:`~meshfusion.dpu.image.errors.BfbError`."""
    images: list[BfbImage] = []
    offset = 0
    while offset < len(data) or not images:
        part = _read_header(data[offset : offset + HEADER_BYTES], offset)
        begin = offset + HEADER_BYTES
        padded = data[begin : begin + _padded(part.length_bytes)]
        _check_body(part, len(padded), zlib.crc32(padded))
        images.append(BfbImage(part.image_id, part.version, padded[: part.length_bytes]))
        offset = begin + len(padded)
    return tuple(images)


def scan_bfb(file: BinaryIO, told: Callable[[int], None] = lambda done_bytes: None) -> BfbSummary:
    """Read and check a stream of any size, from where ``file`` stands to its end, without holding it in memory.

    ``told``: how many bytes were read so far. Raises :class:`~meshfusion.dpu.image.errors.BfbError`.
    """
    digest = hashlib.sha256()
    parts: list[BfbPart] = []
    offset = 0
    while header := file.read(HEADER_BYTES):
        digest.update(header)
        part = _read_header(header, offset)
        crc32, left_bytes = 0, _padded(part.length_bytes)
        while left_bytes and (piece := file.read(min(left_bytes, _READ_BYTES))):
            digest.update(piece)
            crc32 = zlib.crc32(piece, crc32)
            left_bytes -= len(piece)
            told(offset + HEADER_BYTES + _padded(part.length_bytes) - left_bytes)
        _check_body(part, _padded(part.length_bytes) - left_bytes, crc32)
        parts.append(part)
        offset += HEADER_BYTES + _padded(part.length_bytes)
    if not parts:
        _read_header(b"", 0)
    return BfbSummary(tuple(parts), offset, digest.hexdigest())


def _header(image: BfbImage, next_version: int, crc32: int, following: int) -> bytes:
    assert 0 <= image.image_id <= MAX_IMAGE_ID, image.image_id
    assert 0 <= image.version <= 15, image.version
    assert len(image.data) < 1 << 32, len(image.data)
    first = MAGIC | _MAJOR << 32 | _MINOR << 36 | next_version << 44 | image.version << 48
    first |= HEADER_BYTES // 8 << 52 | image.image_id << 56
    return _HEADER.pack(first, len(image.data) | crc32 << 32, following)


def _read_header(data: bytes, offset_bytes: int) -> BfbPart:
    if len(data) < HEADER_BYTES:
        if not data and not offset_bytes:
            raise BfbError(0, f"the file is empty; a stream begins with a header of {HEADER_BYTES} bytes")
        raise BfbError(offset_bytes, f"the file ends {len(data)} bytes into a header of {HEADER_BYTES}")
    first, second, _ = _HEADER.unpack(data)
    if first & 0xFFFFFFFF != MAGIC:
        behind = "" if not offset_bytes else "; has a bf.cfg been appended already? Name it apart from the stream"
        raise BfbError(
            offset_bytes, f"an image should begin with {MAGIC:#010x}, not {first & 0xFFFFFFFF:#010x}{behind}"
        )
    major, minor, words = first >> 32 & 0xF, first >> 36 & 0xF, first >> 52 & 0xF
    if major != _MAJOR or minor > _MINOR:
        raise BfbError(
            offset_bytes, f"the format has version {major}.{minor}; {_MAJOR}.0 to {_MAJOR}.{_MINOR} are known"
        )
    if words != HEADER_BYTES // 8:
        raise BfbError(offset_bytes, f"the header has {words * 8} bytes, not {HEADER_BYTES}")
    version = first >> 48 & 0xF if minor == _MINOR else 0
    image_id = first >> 56
    if image_id > MAX_IMAGE_ID:
        raise BfbError(offset_bytes, f"the image id is {image_id}; there are ids up to {MAX_IMAGE_ID}")
    return BfbPart(image_id, version, offset_bytes, second & 0xFFFFFFFF, second >> 32)


def _check_body(part: BfbPart, found_bytes: int, found_crc32: int) -> None:
    wanted_bytes = _padded(part.length_bytes)
    if found_bytes < wanted_bytes:
        begin = part.offset_bytes + HEADER_BYTES
        raise BfbError(
            begin + found_bytes, f"the file ends {wanted_bytes - found_bytes} bytes before image {part.image_id} does"
        )
    if found_crc32 != part.crc32:
        reason = f"image {part.image_id} has the checksum {found_crc32:#010x}, its header says {part.crc32:#010x}"
        raise BfbError(part.offset_bytes, reason)


def _padded(length_bytes: int) -> int:
    return length_bytes + -length_bytes % ALIGNMENT_BYTES
