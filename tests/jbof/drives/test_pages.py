from __future__ import annotations

import pytest

from meshfusion.jbof.drives.health import parse_endurance_group, parse_health
from meshfusion.jbof.drives.pages import read_drive
from meshfusion.jbof.drives.placement import parse_fdp_configs, parse_fdp_statistics, parse_zones
from meshfusion.jbof.errors import MediaError
from tests.jbof.drives.fake_pages import FakePages, drive_pages
from tests.jbof.drives.recordings import page_of


def with_fdp(pages: FakePages, *, group: int = 3) -> FakePages:
    controller = bytearray(pages.identify_pages[0x01, 0, 0])
    controller[96:100] = (1 << 4 | 1 << 19).to_bytes(4, "little")
    namespace = bytearray(pages.identify_pages[0x00, 1, 0])
    namespace[102:104] = group.to_bytes(2, "little")
    pages.identify_pages |= {(0x01, 0, 0): bytes(controller), (0x00, 1, 0): bytes(namespace)}
    pages.log_pages |= {
        (0x09, group): page_of("endurance_group"),
        (0x20, group): page_of("fdp_configs"),
        (0x22, group): page_of("fdp_stats"),
    }
    pages.features[0x1D, group] = 1 << 8 | 1
    return pages


def test_an_ordinary_drive() -> None:
    pages = drive_pages("S9")
    reading = read_drive(pages, 1)
    assert reading.identity.key == "S9/nsid.1"
    assert reading.identity.model == "QEMU NVMe Ctrl"
    assert reading.capabilities.capacity_bytes == 128 << 20
    assert reading.health == parse_health(page_of("smart"))
    assert (reading.endurance, reading.fdp_statistics, reading.capabilities.fdp) == (None, None, None)
    # Only what it says that it has was asked for.
    assert not [entry for entry in pages.asked if entry[:2] in [("log", 0x09), ("log", 0x20), ("log", 0x22)]]


def test_a_drive_with_flexible_data_placement() -> None:
    reading = read_drive(with_fdp(drive_pages()), 1)
    fdp = reading.capabilities.fdp
    assert fdp is not None
    assert fdp.configs == parse_fdp_configs(page_of("fdp_configs"))
    assert fdp.enabled == fdp.configs[1]
    assert reading.endurance == parse_endurance_group(page_of("endurance_group"))
    assert reading.fdp_statistics == parse_fdp_statistics(page_of("fdp_stats"))
    assert reading.capabilities.endurance_group == 3


def test_gauges_that_are_refused_are_left_out() -> None:
    pages = with_fdp(drive_pages())
    for page in (0x02, 0x09, 0x22):
        pages.log_pages = {key: value for key, value in pages.log_pages.items() if key[0] != page}
    reading = read_drive(pages, 1)
    assert (reading.health, reading.endurance, reading.fdp_statistics) == (None, None, None)
    assert reading.health_note == "no log page 2"


def test_a_log_of_zeros_is_no_health() -> None:
    pages = drive_pages()
    pages.log_pages[0x02, 0] = bytes(512)
    reading = read_drive(pages, 1)
    assert reading.health is None
    assert "zeros" in reading.health_note


def test_a_zoned_drive() -> None:
    pages = drive_pages()
    pages.identify_pages |= {
        (0x00, 1, 0): page_of("namespace", "QEMU 7.2", 1),
        (0x03, 1, 0): page_of("descriptors", "QEMU 7.2", 1),
        (0x05, 1, 2): page_of("zns").ljust(4096, b"\0")[:2816] + page_of("zns")[2816:2832] * 16 + bytes(1024),
    }
    reading = read_drive(pages, 1)
    assert reading.capabilities.zones == parse_zones(page_of("zns"), 0)
    assert "zoned" in reading.capabilities.problem


def test_a_drive_of_before_descriptors() -> None:
    pages = drive_pages()
    del pages.identify_pages[0x03, 1, 0]
    assert read_drive(pages, 1).identity.key == "S1/nsid.1"


def test_a_namespace_that_went_away() -> None:
    pages = drive_pages()
    pages.identify_pages[0x00, 1, 0] = bytes(4096)
    with pytest.raises(MediaError, match="namespace 1 is not there any more"):
        read_drive(pages, 1)
