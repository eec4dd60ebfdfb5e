"""Many pieces of memory in one transfer, and what O_DIRECT asks of them."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.direct import ASSUMED_ALIGNMENT, DirectAlignment, direct_alignment
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import DirectMode, open_data_file
from meshfusion.jbof.media.vectors import MAX_VECTORS, length_of, rest_of

LBA = 4096
FILE_LBAS = 1024
MODES = [DirectMode.AUTO, DirectMode.OFF]


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    """A file of 4 MiB of which no two words of 4 bytes are the same."""
    path = tmp_path / "data"
    np.arange(FILE_LBAS * LBA // 4, dtype="<u4").tofile(path)
    return path


def shuffled_pieces(buffer: AlignedBuffer, piece_bytes: int, seed: int) -> list[memoryview]:
    """All of ``buffer`` in pieces, in an order of its own."""
    starts = list(range(0, buffer.size_bytes, piece_bytes))
    random.Random(seed).shuffle(starts)
    return [buffer.view[start : start + piece_bytes] for start in starts]


@given(st.lists(st.binary(max_size=9), max_size=8), st.data())
def test_the_rest_is_what_lies_behind(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    done = data.draw(st.integers(0, len(whole)))
    rest = rest_of([memoryview(piece) for piece in pieces], done)
    assert b"".join(rest) == whole[done:]
    assert length_of(rest) == len(whole) - done
    if done:
        assert all(len(piece) for piece in rest[:1])
    with pytest.raises(AssertionError):
        rest_of([memoryview(piece) for piece in pieces], len(whole) + 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("piece_bytes", [LBA, 3 * LBA, "granule"])
def test_pieces_are_filled_and_written_in_their_order(
    data_path: Path, mode: DirectMode, piece_bytes: int | str
) -> None:
    with (
        open_data_file(data_path, writable=True, direct=mode) as data,
        AlignedBuffer(300 * LBA) as buffer,
    ):
        size = granule_of(data.alignment) if isinstance(piece_bytes, str) else piece_bytes
        pieces = shuffled_pieces(buffer, size, seed=1)
        before = data_path.read_bytes()
        data.read_vectors(7, pieces)
        assert b"".join(pieces) == before[7 * LBA : 307 * LBA]
        data.write_vectors(500, pieces)
        data.flush()
    after = data_path.read_bytes()
    assert after[500 * LBA : 800 * LBA] == before[7 * LBA : 307 * LBA]
    assert (after[: 500 * LBA], after[800 * LBA :]) == (before[: 500 * LBA], before[800 * LBA :])


@pytest.mark.parametrize("mode", MODES)
def test_more_pieces_than_one_call_takes(data_path: Path, mode: DirectMode, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        counts.append(len(buffers))
        return preadv(fd, buffers, offset)

    with open_data_file(data_path, writable=False, direct=mode) as data, AlignedBuffer(FILE_LBAS * LBA) as buffer:
        monkeypatch.setattr(os, "preadv", counting)
        size = granule_of(data.alignment)
        pieces = shuffled_pieces(buffer, size, seed=2)
        data.read_vectors(0, pieces)
        assert b"".join(pieces) == data_path.read_bytes()
        assert max(counts) <= MAX_VECTORS
        assert sum(counts) == len(pieces)


@pytest.mark.parametrize("mode", MODES)
def test_short_transfers_go_on_inside_a_piece(
    data_path: Path, monkeypatch: pytest.MonkeyPatch, mode: DirectMode
) -> None:
    """A kernel may move less than asked, and end anywhere."""
    dice = random.Random(5)
    preadv, pwritev = os.preadv, os.pwritev
    seen: list[int] = []

    def shortened(buffers: Sequence[memoryview]) -> list[memoryview]:
        kept = list(buffers[: dice.randrange(1, 9)])
        if len(kept[-1]) > LBA:
            kept[-1] = kept[-1][: dice.randrange(LBA, len(kept[-1]), LBA)]
        return kept

    def told(moved: int) -> int:
        seen.append(moved - dice.choice([0, 100, 512] if moved > LBA else [0]))
        return seen[-1]

    with open_data_file(data_path, writable=True, direct=mode) as data, AlignedBuffer(90 * LBA) as buffer:
        monkeypatch.setattr(os, "preadv", lambda fd, b, at: told(preadv(fd, shortened(b), at)))
        monkeypatch.setattr(os, "pwritev", lambda fd, b, at: told(pwritev(fd, shortened(b), at)))
        pieces = shuffled_pieces(buffer, 3 * LBA, seed=3)
        for _ in range(10):
            buffer.array[:] = np.frombuffer(dice.randbytes(buffer.size_bytes), dtype=np.uint8)
            expected = b"".join(pieces)
            data.write_vectors(64, pieces)
            buffer.array[:] = 0
            data.read_vectors(64, pieces)
            assert b"".join(pieces) == expected
    assert any(moved % LBA for moved in seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_bytes", [0, 9 * LBA, 10 * LBA - 512, 10 * LBA + 100])
def test_a_truncated_file(data_path: Path, mode: DirectMode, left_bytes: int) -> None:
    with open_data_file(data_path, writable=False, direct=mode) as data, AlignedBuffer(4 * LBA) as buffer:
        os.truncate(data_path, left_bytes)
        with pytest.raises(DataFileError, match="truncated") as caught:
            data.read_vectors(8, shuffled_pieces(buffer, 2 * LBA, seed=1))
        assert caught.value.fault is MediaFault.SHORT
        assert caught.value.offset_bytes == 8 * LBA


def test_a_write_never_grows_the_file(data_path: Path) -> None:
    with open_data_file(data_path, writable=True) as data, AlignedBuffer(2 * LBA) as buffer:
        pieces = [buffer.view[LBA:], buffer.view[:LBA]]
        with pytest.raises(DataFileError, match="inside a write") as caught:
            data.write_vectors(FILE_LBAS - 1, pieces)
        assert caught.value.fault is MediaFault.SHORT
    assert data_path.stat().st_size == FILE_LBAS * LBA
    assert data_path.read_bytes()[-4:] == (FILE_LBAS * LBA // 4 - 1).to_bytes(4, "little"), "nothing of it is written"


@pytest.mark.parametrize("number", [errno.EIO, errno.EREMOTEIO])
def test_an_error_half_way_names_where(data_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.preadv

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset > 3 * LBA:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers[:1], offset)

    with open_data_file(data_path, writable=False) as data, AlignedBuffer(4 * LBA) as buffer:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(DataFileError, match="reading 12288 bytes at byte 16384 failed") as caught:
            data.read_vectors(3, shuffled_pieces(buffer, LBA, seed=1))
        assert (caught.value.fault, caught.value.errno) == (MediaFault.IO, number)


def test_our_own_mistakes(data_path: Path) -> None:
    with open_data_file(data_path, writable=False) as data, AlignedBuffer(2 * LBA) as buffer:
        with pytest.raises(AssertionError):
            data.write_vectors(0, [buffer.view])
        with pytest.raises(AssertionError):
            data.read_vectors(0, [buffer.view[:LBA], buffer.view[LBA : LBA + 512]])
        with pytest.raises(AssertionError):
            data.read_vectors(-1, [buffer.view])
        data.close()
        with pytest.raises(AssertionError):
            data.read_vectors(0, [buffer.view])


# ---- what the kernel tells -----------------------------------------------------------------------------------------


def granule_of(alignment: DirectAlignment | None) -> int:
    return alignment.granule_bytes if alignment else LBA


class FakeC:
    """A C library whose statx answers with these numbers; -1: with an error."""

    def __init__(self, mask: int, memory_bytes: int, length_bytes: int, code: int = 0) -> None:
        self.answer = struct.pack("=I", mask).ljust(152, b"\0") + struct.pack("=II", memory_bytes, length_bytes)
        self.code = code

    def statx(self, fd: int, path: bytes, flags: int, mask: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
        ctypes.memmove(buffer, self.answer, len(self.answer))
        return self.code


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (FakeC(0x37FF, 4, 512), DirectAlignment(4, 512, is_told=True)),
        (FakeC(0x37FF, 512, 4096), DirectAlignment(512, 4096, is_told=True)),
        (FakeC(0x37FF, 0, 0), None),  # it does no direct I/O
        (FakeC(0x17FF, 0, 0), ASSUMED_ALIGNMENT),  # Linux before 6.1, or a filesystem that does not answer
        (FakeC(0x37FF, 4, 512, code=-1), ASSUMED_ALIGNMENT),
        (object(), ASSUMED_ALIGNMENT),  # a C library without it
    ],
)
def test_what_the_kernel_tells(
    data_path: Path, monkeypatch: pytest.MonkeyPatch, library: object, expected: DirectAlignment | None
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with open_data_file(data_path, writable=False) as data:
        assert data.alignment == expected


def test_what_is_told_holds(data_path: Path) -> None:
    """The kernel reads to an address and with lengths that are aligned just so, and no better."""
    with open_data_file(data_path, writable=False) as data, AlignedBuffer(4 * LBA) as buffer:
        alignment = data.alignment
        assert alignment == direct_alignment(data._fd)
        if not data.direct or alignment is None:
            pytest.skip("needs hardware: a filesystem with O_DIRECT below the temporary folder")
        first = alignment.memory_bytes
        cut = first + alignment.granule_bytes
        data.read_vectors(3, [buffer.view[first:cut], buffer.view[cut : first + LBA]])
        assert bytes(buffer.view[first : first + LBA]) == data_path.read_bytes()[3 * LBA : 4 * LBA]
