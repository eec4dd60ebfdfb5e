"""What is found on a drive, and how many reads it takes; tests/sim/power shows that it is enough after any cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from meshfusion.jbof.format import LBA_BYTES, ChunkHeader, encode_chunk_header
from meshfusion.jbof.label import Label
from meshfusion.jbof.recovery import (
    SCAN_LBA_COUNT,
    Drive,
    Read,
    Reading,
    SegmentContents,
    find_contents,
    find_header,
)
from meshfusion.jbof.segment_format import (
    SegmentHeader,
    SegmentSummary,
    SummaryEntry,
    encode_segment_header,
    encode_summary,
)
from meshfusion.jbof.segments import SegmentGeometry

GEOMETRY = SegmentGeometry(LBA_BYTES, 256, 1024, 2)
LABEL = Label(b"p" * 16, b"d" * 16, 0, 1024, 2)
DRIVE = Drive(LABEL, GEOMETRY)
FIRST, END = 256, 256 + 1024
HEADER = SegmentHeader(b"p" * 16, b"d" * 16, 0, 0, 5, 9, 2, 0, FIRST)
UNIT = b"u" * LBA_BYTES
NONE: Mapping[str, object] = {}


def digest_of(unit: bytes) -> bytes:
    return unit[:8]


class Blocks:
    """A drive of zeros on which something lies; counts what is read."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.unreadable: set[int] = set()
        self.asked: list[Read] = []

    def put(self, lba: int, data: bytes) -> None:
        for i in range(0, len(data), LBA_BYTES):
            self.held[lba + i // LBA_BYTES] = data[i : i + LBA_BYTES]

    def put_chunk(self, lba: int, units: int = 1, changes: Mapping[str, object] = NONE) -> ChunkHeader:
        fields: dict[str, object] = {
            "pool_uuid": LABEL.pool_uuid,
            "identity": b"i" * 32,
            "key": lba.to_bytes(32, "big")[::-1],
            "tenant": "default",
            "group": 0,
            "rank": 0,
            "shard_count": 1,
            "position_tokens": 0,
            "token_count": 16,
            "segment": 0,
            "generation": 5,
            "lba": lba,
            "unit_bytes": LBA_BYTES,
            "unit_digests": (digest_of(UNIT),) * units,
        }
        chunk = ChunkHeader(**(fields | dict(changes)))  # type: ignore[arg-type]
        self.put(lba, encode_chunk_header(chunk) + UNIT * units)
        return chunk

    def run(self, reading: Reading[SegmentContents]) -> SegmentContents:
        data = None
        self.asked.clear()
        while True:
            try:
                asked = reading.send(data)
            except StopIteration as ended:
                found: SegmentContents = ended.value
                return found
            self.asked.append(asked)
            lbas = range(asked.lba, asked.lba + asked.lba_count)
            bad = not self.unreadable.isdisjoint(lbas)
            data = None if bad else b"".join(self.held.get(lba, bytes(LBA_BYTES)) for lba in lbas)

    def contents(self) -> SegmentContents:
        return self.run(find_contents(DRIVE, HEADER, digest_of))


def summary(*chunks: ChunkHeader, generation: int = 5) -> SegmentSummary:
    entries = tuple(SummaryEntry(c.lba - FIRST, 1 + c.unit_count, c.key[:8]) for c in chunks)
    return SegmentSummary(b"p" * 16, b"d" * 16, 0, 0, generation, END, entries)


def put_summary(blocks: Blocks, found: SegmentSummary) -> None:
    data = encode_summary(found)
    blocks.put(END - len(data) // LBA_BYTES, data)


def header_of(blocks: Blocks) -> SegmentHeader | None:
    reading = find_header(DRIVE, 0)
    assert next(reading) == Read(FIRST, 1)
    with pytest.raises(StopIteration) as ended:
        reading.send(blocks.held.get(FIRST, bytes(LBA_BYTES)))
    found: SegmentHeader | None = ended.value.value
    return found


def test_a_header_that_counts() -> None:
    blocks = Blocks()
    assert header_of(blocks) is None
    blocks.put(FIRST, encode_segment_header(HEADER))
    assert header_of(blocks) == HEADER


@pytest.mark.parametrize(
    "changes",
    [{"lba": 7}, {"segment": 1}, {"pool_uuid": b"x" * 16}, {"drive_uuid": b"x" * 16}, {"drive_number": 1}],
)
def test_a_header_of_another_place_does_not_count(changes: dict[str, object]) -> None:
    blocks = Blocks()
    blocks.put(FIRST, encode_segment_header(replace(HEADER, **changes)))  # type: ignore[arg-type]
    assert header_of(blocks) is None


def test_a_settled_segment_takes_a_read_for_each_extent() -> None:
    blocks = Blocks()
    chunks = [blocks.put_chunk(FIRST + 1 + 3 * i, units=2) for i in range(300)]
    put_summary(blocks, summary(*chunks))
    found = blocks.contents()
    assert found.chunks == chunks
    assert (found.is_summarized, found.is_stale, found.refused) == (True, False, 0)
    assert len(blocks.asked) == 2 + 300, "two for a summary of two blocks"
    assert sum(asked.lba_count for asked in blocks.asked) == 2 + 300


def test_a_new_segment_is_scanned_in_large_pieces() -> None:
    blocks = Blocks()
    assert blocks.contents().chunks == []
    assert len(blocks.asked) == 1 + -(-1022 // SCAN_LBA_COUNT)
    assert sum(asked.lba_count for asked in blocks.asked) == 1 + 1022


def test_no_block_of_an_open_segment_is_read_more_than_twice() -> None:
    blocks = Blocks()
    chunks = [blocks.put_chunk(FIRST + 1, units=600), blocks.put_chunk(FIRST + 1 + 603, units=2)]
    chunks += [blocks.put_chunk(FIRST + 1 + 606 + 2 * i) for i in range(100)]
    found = blocks.contents()
    assert found.chunks == chunks
    assert not found.is_summarized
    times = [lba for asked in blocks.asked for lba in range(asked.lba, asked.lba + asked.lba_count)]
    assert max(times.count(lba) for lba in set(times)) == 2
    assert len(blocks.asked) < 1 + 4 + 2 * len(chunks) + 3


def test_only_whole_chunks_of_a_scan_count() -> None:
    blocks = Blocks()
    good = blocks.put_chunk(FIRST + 1, units=2)
    blocks.put_chunk(FIRST + 4, units=2)
    blocks.put(FIRST + 6, b"x" * LBA_BYTES)  # its second unit
    behind = blocks.put_chunk(FIRST + 7)
    found = blocks.contents()
    assert found.chunks == [good, behind]
    assert found.refused == 1


@pytest.mark.parametrize(
    "changes", [{"generation": 4}, {"lba": FIRST + 2}, {"segment": 1}, {"pool_uuid": b"x" * 16}], ids=str
)
def test_chunks_of_another_time_or_place_do_not_count(changes: dict[str, object]) -> None:
    blocks = Blocks()
    blocks.put_chunk(FIRST + 1, changes=changes)
    assert blocks.contents().chunks == []
    put_summary(blocks, summary(replace(blocks.put_chunk(FIRST + 1, changes=changes), lba=FIRST + 1)))
    found = blocks.contents()
    assert (found.chunks, found.refused) == ([], 1)


def test_a_summary_names_the_key() -> None:
    blocks = Blocks()
    put_summary(blocks, summary(replace(blocks.put_chunk(FIRST + 1), key=b"x" * 32)))
    assert blocks.contents().refused == 1


def test_the_summary_of_an_earlier_generation_is_none() -> None:
    blocks = Blocks()
    chunk = blocks.put_chunk(FIRST + 1)
    put_summary(blocks, summary(generation=4))
    found = blocks.contents()
    assert found.chunks == [chunk]
    assert not found.is_summarized


@pytest.mark.parametrize("where", ["summary", "chunk"])
def test_what_is_later_than_the_header_shows_a_lost_one(where: str) -> None:
    blocks = Blocks()
    blocks.put_chunk(FIRST + 1)
    if where == "summary":
        put_summary(blocks, summary(generation=7))
    else:
        blocks.put_chunk(FIRST + 3, changes={"generation": 7})
    found = blocks.contents()
    assert (found.is_stale, found.chunks, found.highest_generation) == (True, [], 7)


def test_what_cannot_be_read_is_passed_over() -> None:
    blocks = Blocks()
    blocks.put_chunk(FIRST + 1)
    other = blocks.put_chunk(FIRST + 1 + SCAN_LBA_COUNT)
    blocks.unreadable.add(FIRST + 9)
    blocks.unreadable.add(END - 1)
    assert blocks.contents().chunks == [other]
