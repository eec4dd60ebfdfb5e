"""Who can take the block path: the refusals name the numbers and the way out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.path.block import block_path
from meshfusion.host.path.block_layout import (
    MOST_WAIT_S,
    Runs,
    check_block_layout,
    check_direct,
    check_patience,
    check_runs_at_all,
)
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.direct import ASSUMED_ALIGNMENT, DirectAlignment
from meshfusion.jbof.media.fabrics import FabricsLink
from meshfusion.jbof.media.file import DataFile, DirectMode, create_data_file, open_data_file
from tests.host.support.data_files import open_new_file
from tests.host.support.kv_memory import KvMemory, block_outermost, layer_outermost

PAGE_AT = 0x7F00_0000_0000  # where KV memory might lie


def data_file(
    alignment: DirectAlignment | None, *, direct: bool = True, fabrics: tuple[FabricsLink, ...] = ()
) -> DataFile:
    """Nothing is read from it."""
    return DataFile(
        -1,
        Path("/pool/data"),
        size_bytes=0,
        writable=True,
        direct=direct,
        reason="because",
        alignment=alignment,
        fabrics=fabrics,
    )


def told(memory_bytes: int, length_bytes: int) -> DirectAlignment:
    return DirectAlignment(memory_bytes, length_bytes, is_told=True)


def layers(page_bytes: int, gap_bytes: int, lead_bytes: int, layer_gap_bytes: int = 0) -> KvMemory:
    return layer_outermost(
        blocks=4,
        layers=2,
        page_bytes=page_bytes,
        gap_bytes=gap_bytes,
        lead_bytes=lead_bytes,
        layer_gap_bytes=layer_gap_bytes,
    )


@pytest.mark.parametrize(
    ("alignment", "kv", "address"),
    [
        (told(512, 512), layers(1536, 512, 1024), PAGE_AT),
        (told(512, 512), layers(1536, 512, 448), PAGE_AT + 64),
        (told(4, 512), layers(1536, 4, 8, 12), PAGE_AT + 64),  # as NVMe drives have it: only lengths matter
        (told(4, 4096), layers(8192, 4, 8, 12), PAGE_AT + 64),
        (ASSUMED_ALIGNMENT, layers(4096, 0, 4096), PAGE_AT),
        (told(512, 512), block_outermost(blocks=1, layers=1, page_bytes=512), PAGE_AT + 1024),
    ],
)
def test_it_can(alignment: DirectAlignment, kv: KvMemory, address: int) -> None:
    check_block_layout(data_file(alignment), address, (kv.layout,))


@pytest.mark.parametrize(
    ("alignment", "kv", "address", "words"),
    [
        (told(512, 512), layers(1236, 52, 0), PAGE_AT, ["1236 bytes", "512", "the kernel says"]),
        (told(512, 512), layers(1792, 256, 0), PAGE_AT, ["1792 bytes", "512"]),
        (told(4, 4096), layers(1536, 512, 0), PAGE_AT, ["1536 bytes", "4096"]),
        (told(4096, 512), layers(1536, 512, 0), PAGE_AT, ["1536 bytes", "4096"]),  # cut at 512 they would miss 4096
        (ASSUMED_ALIGNMENT, layers(1536, 512, 0), PAGE_AT, ["1536 bytes", "4096", "assumed"]),
        (told(512, 512), layers(1536, 512, 0), PAGE_AT + 64, ["at multiples of 64 bytes", "512"]),
        (told(512, 512), layers(1536, 512, 100), PAGE_AT, ["at multiples of 4 bytes"]),
        (told(512, 512), layers(1536, 516, 0, 496), PAGE_AT, ["multiples of 4 bytes"]),  # only the second block
        (told(512, 512), layers(1536, 512, 0, 8), PAGE_AT, ["multiples of 8 bytes"]),  # only the second layer
    ],
)
def test_it_cannot(alignment: DirectAlignment, kv: KvMemory, address: int, words: list[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_block_layout(data_file(alignment), address, (kv.layout,))
    assert all(word in caught.value.message for word in [*words, "/pool/data"])
    assert "staged path" in caught.value.next_step


def test_without_direct_io_it_is_no_block_path() -> None:
    with pytest.raises(UnsupportedError, match="O_DIRECT is not in use: because") as caught:
        check_direct(data_file(told(512, 512), direct=False))
    assert "staged path" in caught.value.next_step
    with pytest.raises(UnsupportedError, match="says that this file does no direct I/O"):
        check_direct(data_file(None))
    assert check_direct(data_file(told(4, 512))) == told(4, 512)


@given(
    address=st.integers(0, 1 << 47),
    starts=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4),
    stride=st.integers(1, 1 << 30),
    shift=st.integers(0, 13),
    block_count=st.integers(1, 3),
)
def test_runs_lie_as_their_places_do(
    address: int, starts: list[int], stride: int, shift: int, block_count: int
) -> None:
    """Counted out: every run's own address."""
    address <<= shift
    layout = replace(
        layers(512, 0, 0).layout,
        block_count=block_count,
        run_starts=np.array([start << shift for start in starts], dtype=np.int64),
        run_strides=np.full(len(starts), stride << shift, dtype=np.int64),
    )
    places = [address + (start << shift) + n * (stride << shift) for start in starts for n in range(block_count)]
    runs = Runs.of(address, (layout,))
    assert runs.run_bytes == 512
    for bits in range(21):
        assert (runs.place_bytes % (1 << bits) == 0) == all(place % (1 << bits) == 0 for place in places), bits


def test_runs_that_no_drive_takes_are_refused_without_asking_one() -> None:
    for run_bytes in (512, 4096, 12288):
        check_runs_at_all(Runs(run_bytes, 1))
    for run_bytes in (1236, 256, 4097, 520):
        with pytest.raises(UnsupportedError, match=f"runs of {run_bytes} bytes, not a multiple of the 512") as caught:
            check_runs_at_all(Runs(run_bytes, 4096))
        assert "block size" in caught.value.next_step


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ((None,), ["waits for ever", "nvme0 (NVMe/tcp)"]),
        ((600,), ["waits 600 s", str(MOST_WAIT_S)]),
        ((MOST_WAIT_S + 1,), ["waits 31 s"]),
        ((5, 600), ["waits 600 s", "nvme0, nvme1"]),  # the last path that is left decides
        ((5, None), ["waits for ever"]),
    ],
)
def test_a_connection_that_keeps_blocks_too_long_is_refused(waits: tuple[int | None, ...], words: list[str]) -> None:
    links = tuple(FabricsLink(f"nvme{i}", "tcp", wait_s) for i, wait_s in enumerate(waits))
    with pytest.raises(UnsupportedError) as caught:
        check_patience(data_file(told(4, 512), fabrics=links))
    assert all(word in caught.value.message for word in [*words, "/pool/data"]), caught.value.message
    assert "echo 5 > /sys/class/nvme/nvme0/fast_io_fail_tmo" in caught.value.next_step


def test_a_drive_of_this_machine_and_a_connection_with_a_limit_keep_blocks_in_time() -> None:
    check_patience(data_file(told(4, 512)))
    check_patience(data_file(told(4, 512), fabrics=(FabricsLink("nvme0", "tcp", MOST_WAIT_S),)))


def test_a_refused_path_has_closed_its_file(tmp_path: Path, kernels: DigestKernels) -> None:
    kv = layers(1536, 512, 0)
    create_data_file(tmp_path / "data", LBA_BYTES)
    with open_data_file(tmp_path / "data", writable=True, direct=DirectMode.OFF) as data:
        with pytest.raises(UnsupportedError):
            block_path(data, kv.memory, (kv.layout,), kernels, lba_bytes=LBA_BYTES, load_threads=1, max_units=1)
        assert data._fd < 0


def test_what_a_real_file_asks_for(tmp_path: Path) -> None:
    data = open_new_file(tmp_path / "data")
    try:
        if not data.direct or data.alignment is None:
            with pytest.raises(UnsupportedError):
                check_direct(data)
            return
        kv = layers(data.alignment.granule_bytes, 0, 0)
        check_block_layout(data, PAGE_AT, (kv.layout,))
        odd = layers(data.alignment.granule_bytes + 4, 0, 0)
        with pytest.raises(UnsupportedError):
            check_block_layout(data, PAGE_AT, (odd.layout,))
    finally:
        data.close()
