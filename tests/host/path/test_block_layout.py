"""Who can take the block path: the refusals name the numbers and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.host.path.block import block_path
from meshfusion.host.path.block_layout import check_block_layout, check_direct
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.direct import ASSUMED_ALIGNMENT, DirectAlignment
from meshfusion.jbof.media.file import DataFile, DirectMode, create_data_file, open_data_file
from tests.host.support.data_files import open_new_file
from tests.host.support.kv_memory import KvMemory, block_outermost, layer_outermost

PAGE_AT = 0x7F00_0000_0000  # where KV memory might lie


def data_file(alignment: DirectAlignment | None, *, direct: bool = True) -> DataFile:
    """Nothing is read from it."""
    return DataFile(
        -1, Path("/pool/data"), size_bytes=0, writable=True, direct=direct, reason="because", alignment=alignment
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
    check_block_layout(data_file(alignment), address, kv.layout)


@pytest.mark.parametrize(
    ("alignment", "kv", "address", "words"),
    [
        (told(512, 512), layers(1236, 52, 0), PAGE_AT, ["1236 bytes", "512", "the kernel says"]),
        (told(512, 512), layers(1792, 256, 0), PAGE_AT, ["1792 bytes", "512"]),
        (told(4, 4096), layers(1536, 512, 0), PAGE_AT, ["1536 bytes", "4096"]),
        (told(4096, 512), layers(1536, 512, 0), PAGE_AT, ["1536 bytes", "4096"]),  # cut at 512 they would miss 4096
        (ASSUMED_ALIGNMENT, layers(1536, 512, 0), PAGE_AT, ["1536 bytes", "4096", "assumed"]),
        (told(512, 512), layers(1536, 512, 0), PAGE_AT + 64, [hex(PAGE_AT + 64), "64 bytes behind", "512"]),
        (told(512, 512), layers(1536, 512, 100), PAGE_AT, ["100 bytes behind"]),
        (told(512, 512), layers(1536, 516, 0, 496), PAGE_AT, ["4 bytes behind"]),  # only the second block
        (told(512, 512), layers(1536, 512, 0, 8), PAGE_AT, ["8 bytes behind"]),  # only the second layer
    ],
)
def test_it_cannot(alignment: DirectAlignment, kv: KvMemory, address: int, words: list[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_block_layout(data_file(alignment), address, kv.layout)
    assert all(word in caught.value.message for word in [*words, "/pool/data"])
    assert "staged path" in caught.value.next_step


def test_without_direct_io_it_is_no_block_path() -> None:
    with pytest.raises(UnsupportedError, match="O_DIRECT is not in use: because") as caught:
        check_direct(data_file(told(512, 512), direct=False))
    assert "staged path" in caught.value.next_step
    with pytest.raises(UnsupportedError, match="says that this file does no direct I/O"):
        check_direct(data_file(None))
    assert check_direct(data_file(told(4, 512))) == told(4, 512)


def test_a_refused_path_has_closed_its_file(tmp_path: Path, kernels: DigestKernels) -> None:
    kv = layers(1536, 512, 0)
    create_data_file(tmp_path / "data", LBA_BYTES)
    with open_data_file(tmp_path / "data", writable=True, direct=DirectMode.OFF) as data:
        with pytest.raises(UnsupportedError):
            block_path(data, kv.memory, kv.layout, kernels, lba_bytes=LBA_BYTES, load_threads=1, max_units=1)
        assert data._fd < 0


def test_what_a_real_file_asks_for(tmp_path: Path) -> None:
    data = open_new_file(tmp_path / "data")
    try:
        if not data.direct or data.alignment is None:
            with pytest.raises(UnsupportedError):
                check_direct(data)
            return
        kv = layers(data.alignment.granule_bytes, 0, 0)
        check_block_layout(data, PAGE_AT, kv.layout)
        odd = layers(data.alignment.granule_bytes + 4, 0, 0)
        with pytest.raises(UnsupportedError):
            check_block_layout(data, PAGE_AT, odd.layout)
    finally:
        data.close()
