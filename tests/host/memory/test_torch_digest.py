"""The digest by torch is the digest of the format, bit for bit, whatever the layout and however little the scratch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.memory.torch_digest import TorchDigest
from meshfusion.jbof.digest import DigestKernels, KeyTable, load_kernels
from meshfusion.jbof.errors import MediaError
from tests.host.support.kv_memory import block_outermost, layer_outermost

MAX_BYTES = 512 << 10
KEYS = KeyTable.for_bytes(MAX_BYTES)


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(MAX_BYTES)


def torch_digest(memory: npt.NDArray[np.uint8], scratch_bytes: int = 1 << 20) -> TorchDigest:
    return TorchDigest(torch.from_numpy(memory), KEYS, scratch_bytes=scratch_bytes)


@st.composite
def memories(draw: st.DrawFn) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]:
    """Units whose runs lie anywhere, on boundaries of 4 bytes up to 4 KiB, in a memory of any size."""
    grain = 4 * draw(st.sampled_from([1, 3, 128, 1024]))
    run_bytes = grain * draw(st.integers(1, 20))
    units, runs = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    starts = draw(st.lists(st.integers(0, 200), min_size=units * runs, max_size=units * runs))
    size = grain * max(starts) + run_bytes + draw(st.integers(0, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    memory = rng.integers(0, 256, size, dtype=np.uint8)
    return memory, np.array(starts, np.int64).reshape(units, runs) * grain, run_bytes


@given(memories(), st.sampled_from([1, 20_000, 1 << 20]))
def test_equal_to_the_kernels_for_any_layout(
    kernels: DigestKernels, made: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int], scratch_bytes: int
) -> None:
    memory, run_offsets, run_bytes = made
    expected = [kernels.digest_runs(memory, offsets, run_bytes) for offsets in run_offsets]
    assert torch_digest(memory, scratch_bytes).digest_units(run_offsets, run_bytes) == expected


@pytest.mark.parametrize("make", [layer_outermost, block_outermost])
def test_equal_for_layouts_of_engines(kernels: DigestKernels, make: type) -> None:
    kv = make(page_bytes=20_004)  # several tiles, the last not whole
    kv.fill(9)
    expected = [kernels.digest_runs(kv.memory, kv.layout.run_offsets(b), kv.layout.run_bytes) for b in (7, 0, 7)]
    assert torch_digest(kv.memory).digest_units(kv.layout.run_offsets_of([7, 0, 7]), kv.layout.run_bytes) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # golden vectors of the format (tests/jbof/test_digest.py)
        (b"\x00" * 4, "c8afcf1049bcc886"),
        (b"\xff\xff\xff\xff", "18b80d8fe0a4e8c4"),
        (bytes(range(256)), "e60dc47a015d748c"),
        (b"MeshFusion unit." * 3000, "1caee91d6387fbfb"),
    ],
)
def test_golden_vectors(data: bytes, expected: str) -> None:
    memory = np.frombuffer(bytearray(data), np.uint8)
    (digest,) = torch_digest(memory).digest_units(np.zeros((1, 1), np.int64), len(data))
    assert digest.hex() == expected


@pytest.mark.parametrize("extreme", [-(2**31), 2**31 - 1])
def test_extreme_words_wrap_as_the_format_says(kernels: DigestKernels, extreme: int) -> None:
    memory = np.full(MAX_BYTES // 4, extreme, np.int32).view(np.uint8)
    (digest,) = torch_digest(memory).digest_units(np.zeros((1, 1), np.int64), MAX_BYTES)
    assert digest == kernels.digest_runs(memory, [0], MAX_BYTES)


def test_what_lies_outside_is_our_mistake() -> None:
    digest = torch_digest(np.zeros(100, np.uint8))
    assert digest.digest_units(np.zeros((0, 3), np.int64), 4) == []
    for offset, run_bytes in ((100, 4), (-4, 4), (2, 4), (0, 104), (0, 6)):
        with pytest.raises(AssertionError):
            digest.digest_units(np.array([[offset]], np.int64), run_bytes)
    with pytest.raises(AssertionError, match="keys for"):
        digest.digest_units(np.zeros((1, 2), np.int64), MAX_BYTES)


def test_a_device_without_room_is_an_error_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    digest = torch_digest(np.zeros(100, np.uint8))
    monkeypatch.setattr(digest, "_gather", no_room)
    with pytest.raises(MediaError, match="CUDA out of memory"):
        digest.digest_units(np.zeros((1, 1), np.int64), 4)
