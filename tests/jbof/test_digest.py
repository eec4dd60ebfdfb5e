"""The unit digest against an independent reference in Python's big integers, written from the definition."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.jbof.digest import (
    LENGTH_KEY_SEEDS,
    TILE_KEY_SEEDS,
    WORD_KEY_SEEDS,
    DigestKernels,
    KeyTable,
    load_kernels,
)

MASK = 2**64 - 1
MAX_BYTES = 1 << 20


def splitmix64(state: int, index: int) -> int:
    """Output number ``index`` (from 0) of Vigna's splitmix64.c, started at ``state``."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference(data: bytes) -> bytes:
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    halves = []
    for word_seed, length_seed, tile_seed in (
        (0x243F6A8885A308D3, 0xA4093822299F31D0, 0x452821E638D01377),
        (0x13198A2E03707344, 0x082EFA98EC4E6C89, 0xBE5466CF34E90C6C),
    ):
        total = splitmix64(length_seed, 0) * len(data)
        for tile in range(0, len(words), 4096):
            inner = sum(splitmix64(word_seed, i) * word for i, word in enumerate(words[tile : tile + 4096]))
            total += (splitmix64(tile_seed, tile // 4096) | 1) * inner
        halves.append(((total % 2**64) >> 32).to_bytes(4, "little"))
    return b"".join(halves)


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(MAX_BYTES)


def as_array(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def digest(kernels: DigestKernels, data: bytes) -> bytes:
    return kernels.digest_runs(as_array(data), [0], len(data))


whole_words = st.binary(min_size=4, max_size=400).map(lambda data: data[: len(data) // 4 * 4])


@st.composite
def units_in_memory(draw: st.DrawFn) -> tuple[npt.NDArray[np.uint8], list[int], int]:
    """A random memory, and runs in it that do not overlap, in any order."""
    run_bytes = 4 * draw(st.integers(1, 40))
    slots = draw(st.integers(1, 12))
    order = draw(st.permutations(range(slots)))[: draw(st.integers(1, slots))]
    gap = 4 * draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    size = gap + slots * (run_bytes + gap) + draw(st.integers(0, 3))
    memory = np.random.default_rng(seed).integers(0, 256, size=size, dtype=np.uint8)
    return memory, [gap + slot * (run_bytes + gap) for slot in order], run_bytes


def unit_bytes(memory: npt.NDArray[np.uint8], offsets: list[int], run_bytes: int) -> bytes:
    return b"".join(memory[offset : offset + run_bytes].tobytes() for offset in offsets)


def test_generator_is_the_published_splitmix64() -> None:
    # The first outputs for state 1234567, as published with splitmix64.c's ports (Rosetta Code).
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_key_table_is_the_documented_generator() -> None:
    table = KeyTable.for_bytes(3 * 16384 + 4)
    for j in (0, 1):
        assert [int(key) & MASK for key in table.words[j]] == [splitmix64(WORD_KEY_SEEDS[j], i) for i in range(4096)]
        assert [int(key) & MASK for key in table.tiles[j]] == [splitmix64(TILE_KEY_SEEDS[j], t) | 1 for t in range(4)]
        assert not table.tiles[j].flags.writeable
        assert table.length[j] == splitmix64(LENGTH_KEY_SEEDS[j], 0)
        assert not table.words[j].flags.writeable


def test_key_streams_never_meet() -> None:
    """All streams walk one cycle of 2^64 states: their starts must lie further apart than any unit is long."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)
    seeds = (*WORD_KEY_SEEDS, *LENGTH_KEY_SEEDS, *TILE_KEY_SEEDS)
    for a in seeds:
        for b in seeds:
            assert a == b or 2**40 < (a - b) * inverse % 2**64 < 2**64 - 2**40


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "0000000000000000"),
        (b"\x00" * 4, "c8afcf1049bcc886"),
        (b"\x01\x00\x00\x00", "78a79192b2d3a848"),
        (b"\xff\xff\xff\xff", "18b80d8fe0a4e8c4"),
        (bytes(range(256)), "e60dc47a015d748c"),
        (b"MeshFusion unit." * 256, "e5f799a28ba50b2c"),
        (b"MeshFusion unit." * 3000, "1caee91d6387fbfb"),
    ],
)
def test_golden_vectors(kernels: DigestKernels, data: bytes, expected: str) -> None:
    """Fixed for ever: digests lie on media. Computed by the reference above."""
    assert reference(data).hex() == expected
    assert kernels.digest_runs(as_array(data), [0] if data else [], len(data) or 4).hex() == expected


@given(data=whole_words)
def test_contiguous_equals_reference(kernels: DigestKernels, data: bytes) -> None:
    assert digest(kernels, data) == reference(data)


@given(unit=units_in_memory())
def test_any_run_split_equals_contiguous(
    kernels: DigestKernels, unit: tuple[npt.NDArray[np.uint8], list[int], int]
) -> None:
    memory, offsets, run_bytes = unit
    data = unit_bytes(memory, offsets, run_bytes)
    assert kernels.digest_runs(memory, offsets, run_bytes) == reference(data) == digest(kernels, data)


@given(unit=units_in_memory(), lead=st.integers(0, 5), tail=st.integers(0, 5))
def test_gather_then_scatter(
    kernels: DigestKernels, unit: tuple[npt.NDArray[np.uint8], list[int], int], lead: int, tail: int
) -> None:
    memory, offsets, run_bytes = unit
    data = unit_bytes(memory, offsets, run_bytes)
    staging = np.full(4 * lead + len(data) + tail, 0xA5, dtype=np.uint8)
    before = memory.copy()

    assert kernels.gather_and_digest(memory, offsets, run_bytes, staging, 4 * lead) == reference(data)
    assert staging.tobytes() == b"\xa5" * (4 * lead) + data + b"\xa5" * tail
    assert (memory == before).all()

    target = np.full(memory.size, 0x5A, dtype=np.uint8)
    expected = target.copy()
    for offset in offsets:
        expected[offset : offset + run_bytes] = memory[offset : offset + run_bytes]
    assert kernels.scatter_and_digest(staging, 4 * lead, target, offsets, run_bytes) == reference(data)
    assert (target == expected).all()


def test_runs_longer_than_a_tile(kernels: DigestKernels) -> None:
    """Real sizes: tiles are 16 KiB, and run ends fall inside them."""
    run_bytes = 98_304 + 4
    staging = np.random.default_rng(7).integers(0, 256, size=5 * run_bytes, dtype=np.uint8)
    memory = np.zeros(8 * run_bytes, dtype=np.uint8)
    offsets = np.array([3, 0, 7, 1, 4], dtype=np.int64) * run_bytes
    expected = reference(staging.tobytes())
    assert kernels.scatter_and_digest(staging, 0, memory, offsets, run_bytes) == expected
    assert kernels.digest_runs(memory, offsets, run_bytes) == expected
    back = np.zeros_like(staging)
    assert kernels.gather_and_digest(memory, offsets, run_bytes, back, 0) == expected
    assert (back == staging).all()


@given(data=st.data(), unit=units_in_memory(), lead=st.integers(0, 5), gap=st.integers(0, 5))
def test_several_units_in_one_go_equal_one_by_one(
    kernels: DigestKernels,
    data: st.DataObject,
    unit: tuple[npt.NDArray[np.uint8], list[int], int],
    lead: int,
    gap: int,
) -> None:
    memory, offsets, run_bytes = unit
    whole = len(offsets) // data.draw(st.sampled_from([n for n in range(1, len(offsets) + 1) if len(offsets) % n == 0]))
    run_offsets = np.array(offsets, dtype=np.int64).reshape(-1, whole)
    unit_bytes, stride = whole * run_bytes, whole * run_bytes + 4 * gap
    staging = np.random.default_rng(5).integers(0, 256, 4 * lead + len(run_offsets) * stride, dtype=np.uint8)
    expected, target = memory.copy(), memory.copy()
    one_by_one = [
        kernels.scatter_and_digest(staging, 4 * lead + u * stride, expected, runs, run_bytes)
        for u, runs in enumerate(run_offsets)
    ]
    assert one_by_one == [
        reference(staging[4 * lead + u * stride :][:unit_bytes].tobytes()) for u in range(len(run_offsets))
    ]
    assert kernels.scatter_and_digest_units(staging, 4 * lead, stride, target, run_offsets, run_bytes) == one_by_one
    assert (target == expected).all()
    assert kernels.digest_units(target, run_offsets, run_bytes) == one_by_one


@pytest.mark.parametrize("offsets", [[[0], [4096]], [[-4], [0]], [[2], [8]], [[0], [2]], [[4092], [0]]])
def test_several_units_of_which_one_lies_outside_have_no_digest(
    kernels: DigestKernels, offsets: list[list[int]]
) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(AssertionError):
        kernels.digest_units(memory, np.array(offsets, dtype=np.int64), 8)


@pytest.mark.parametrize(
    ("offsets", "staging_offset", "staging_stride"),
    [
        ([[0], [4096]], 0, 8),  # the second unit behind the memory
        ([[-4], [0]], 0, 8),
        ([[2], [8]], 0, 8),
        ([[0], [8]], 0, 4),  # units that overlap in staging
        ([[0], [8]], 4088, 8),  # the second behind the end of staging
        ([[0], [8]], -8, 8),
        ([[0], [8]], 0, 4096),
    ],
)
def test_several_units_are_checked_before_anything_is_touched(
    kernels: DigestKernels, offsets: list[list[int]], staging_offset: int, staging_stride: int
) -> None:
    memory, staging = np.zeros(4096, dtype=np.uint8), np.ones(4096, dtype=np.uint8)
    with pytest.raises(AssertionError):
        kernels.scatter_and_digest_units(
            staging, staging_offset, staging_stride, memory, np.array(offsets, dtype=np.int64), 8
        )
    assert not memory.any()


def test_tiles_that_change_places_change_it(kernels: DigestKernels) -> None:
    """The same keys serve every tile, so only its multiplier tells where a tile lies. Worst case: one top bit."""
    seen = set()
    for tile in range(64):
        data = np.zeros(64 * 16384, dtype=np.uint8)
        data[tile * 16384 + 3] = 0x80
        seen.add(kernels.digest_runs(data, [0], data.size))
    assert len(seen) == 64
    rng = np.random.default_rng(11)
    tiles = rng.integers(0, 256, (8, 16384), dtype=np.uint8)
    original = kernels.digest_runs(tiles.reshape(-1), [0], tiles.size)
    for a in range(8):
        for b in range(a):
            order = list(range(8))
            order[a], order[b] = b, a
            assert kernels.digest_runs(tiles[order].reshape(-1), [0], tiles.size) != original


def test_scatter_digests_the_destination(kernels: DigestKernels) -> None:
    """Copying downwards inside one array leaves the right bytes at the destination and wrong ones at the source."""
    memory = np.random.default_rng(1).integers(0, 256, size=16 << 10, dtype=np.uint8)
    moved = memory[4096:12288].tobytes()
    assert kernels.scatter_and_digest(memory, 4096, memory, [0], 8192) == reference(moved)
    assert memory[:8192].tobytes() == moved
    assert memory[4096:12288].tobytes() != moved


@given(data=whole_words, position=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_changes_it(kernels: DigestKernels, data: bytes, position: int, bit: int) -> None:
    flipped = bytearray(data)
    flipped[position % len(data)] ^= 1 << bit
    assert digest(kernels, bytes(flipped)) != digest(kernels, data)


def test_every_flipped_bit_and_pair_of_top_bits_changes_it(kernels: DigestKernels) -> None:
    data = bytes(range(64))
    seen = {digest(kernels, data)}
    for bit in range(8 * len(data)):
        seen.add(digest(kernels, (int.from_bytes(data, "little") ^ (1 << bit)).to_bytes(64, "little")))
    for a in range(16):
        for b in range(a):
            pair = 1 << (32 * a + 31) | 1 << (32 * b + 31)
            seen.add(digest(kernels, (int.from_bytes(data, "little") ^ pair).to_bytes(64, "little")))
    assert len(seen) == 1 + 512 + 120


@given(data=whole_words, a=st.integers(0), b=st.integers(0))
def test_swapped_words_change_it(kernels: DigestKernels, data: bytes, a: int, b: int) -> None:
    words = [data[i : i + 4] for i in range(0, len(data), 4)]
    a, b = a % len(words), b % len(words)
    words[a], words[b] = words[b], words[a]
    swapped = b"".join(words)
    assert (digest(kernels, swapped) == digest(kernels, data)) == (swapped == data)


def test_swapped_runs_change_it(kernels: DigestKernels) -> None:
    memory = np.random.default_rng(3).integers(0, 256, size=8192, dtype=np.uint8)
    assert kernels.digest_runs(memory, [0, 4096], 4096) != kernels.digest_runs(memory, [4096, 0], 4096)


@given(data=whole_words, words=st.integers(1, 20))
def test_zero_extension_changes_it(kernels: DigestKernels, data: bytes, words: int) -> None:
    assert digest(kernels, data + bytes(4 * words)) != digest(kernels, data)


def test_zeros_of_every_length_differ(kernels: DigestKernels) -> None:
    digests = {digest(kernels, bytes(4 * words)) for words in range(1, 2000)}
    assert len(digests) == 1999


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_halves_are_independent_of_each_other(kernels: DigestKernels, seed: int) -> None:
    value = digest(kernels, np.random.default_rng(seed).bytes(64))
    assert value[:4] != value[4:]


@pytest.mark.parametrize(
    ("offsets", "run_bytes", "staging_offset"),
    [
        ([4096], 4, 0),  # behind the memory
        ([4092], 8, 0),  # across its end
        ([-4], 4, 0),  # before it
        ([2**62], 4, 0),
        ([2], 4, 0),  # not a word boundary
        ([0], 6, 0),
        ([0], 0, 0),
        ([0], 8, 4092),  # across the end of staging
        ([0], 8, -4),
        ([0], 8, 2),
        ([0] * 5, 512 << 10, 0),  # longer than there are keys for
    ],
)
def test_our_own_mistakes_are_caught_before_anything_is_touched(
    kernels: DigestKernels, offsets: list[int], run_bytes: int, staging_offset: int
) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    staging = np.ones(4096, dtype=np.uint8)
    with pytest.raises(AssertionError):
        kernels.scatter_and_digest(staging, staging_offset, memory, offsets, run_bytes)
    with pytest.raises(AssertionError):
        kernels.gather_and_digest(staging, offsets, run_bytes, memory, staging_offset)
    assert not memory.any()


def test_importing_the_module_does_not_import_numba() -> None:
    code = "import sys, meshfusion.jbof.digest; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
