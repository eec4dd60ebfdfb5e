from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.drives.placement import (
    Fdp,
    Isolation,
    fdp_configs_bytes,
    fdp_from_feature,
    parse_fdp_configs,
    parse_fdp_statistics,
    parse_zones,
)
from meshfusion.jbof.nvme.fields import NvmeProtocolError
from tests.jbof.drives.recordings import of_kind, page_of


def test_configurations_as_nvme_cli_reads_them() -> None:
    (recording,) = of_kind("fdp_configs")
    found = parse_fdp_configs(recording.page)
    assert [
        {
            "fdpa": c.is_valid << 7 | c.has_volatile_write_cache << 4 | fdpa & 0xF,
            "vss": 0,
            "nrg": c.reclaim_group_count,
            "nruh": len(c.handles),
            "nnss": c.max_namespaces,
            "runs": c.reclaim_unit_bytes,
            "erutl": c.open_limit_s,
        }
        for c, fdpa in zip(found, (0x93, 0x82), strict=True)
    ] == recording.said["configs"]
    # As the page was made: nvme-cli's JSON leaves these out.
    assert [c.max_placement_ids for c in found] == [8, 3]
    assert found[0].handles == (Isolation.INITIAL,) * 8
    assert found[1].handles == (Isolation.PERSISTENT, Isolation.INITIAL, Isolation.PERSISTENT)
    assert fdp_configs_bytes(recording.page[:16]) == len(recording.page)


def test_statistics_as_nvme_cli_reads_them() -> None:
    (recording,) = of_kind("fdp_stats")
    found = parse_fdp_statistics(recording.page)
    assert found.host_written_bytes == int(recording.said["hbmw"])
    assert found.media_written_bytes == int(recording.said["mbmw"])
    assert found.media_erased_bytes == int(recording.said["mbe"])


def test_write_amplification() -> None:
    page = (1000).to_bytes(16, "little") + (1040).to_bytes(16, "little") + bytes(32)
    assert parse_fdp_statistics(page).write_amplification == pytest.approx(1.04)
    assert parse_fdp_statistics(bytes(64)).write_amplification is None


def test_the_configuration_in_use() -> None:
    configs = parse_fdp_configs(page_of("fdp_configs"))
    assert fdp_from_feature(configs, 0) == Fdp(configs, None)
    assert fdp_from_feature(configs, 1 << 8) == Fdp(configs, None)  # chosen, and off
    assert fdp_from_feature(configs, 1 << 8 | 1) == Fdp(configs, configs[1])
    with pytest.raises(NvmeProtocolError, match="configuration 2 is in use, and there are 2"):
        fdp_from_feature(configs, 2 << 8 | 1)


@pytest.mark.parametrize("index", range(4))
def test_zones_as_nvme_cli_reads_them(index: int) -> None:
    (recording,) = of_kind("zns")
    found = parse_zones(recording.page, index)
    assert found.zone_lbas == recording.said["lbafe"][index]["zsze"]
    # nvme-cli prints them signed, and 0's based
    assert found.max_active == (recording.said["mar"] & 0xFFFFFFFF) + 1
    assert found.max_open == (recording.said["mor"] & 0xFFFFFFFF) + 1


def test_zones_without_limits_and_without_size() -> None:
    page = bytearray(page_of("zns"))
    page[4:12] = b"\xff" * 8
    assert parse_zones(bytes(page), 0).max_open is None
    assert parse_zones(bytes(page), 0).max_active is None
    with pytest.raises(NvmeProtocolError, match="no size"):
        parse_zones(bytes(4096), 0)


def test_a_cut_log_is_refused() -> None:
    page = page_of("fdp_configs")
    for length in (0, 15, 16, 79, len(page) - 20):
        with pytest.raises(NvmeProtocolError):
            parse_fdp_configs(page[:length])


def test_a_configuration_shorter_than_its_handles_is_refused() -> None:
    page = bytearray(page_of("fdp_configs"))
    page[16:18] = (64).to_bytes(2, "little")
    with pytest.raises(NvmeProtocolError, match="64 bytes and 8 handles"):
        parse_fdp_configs(bytes(page))


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(page: bytes) -> None:
    with contextlib.suppress(NvmeProtocolError):
        assert parse_fdp_configs(page)
