from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.drives.health import LOG_BYTES, Health, Warnings, parse_endurance_group, parse_health
from meshfusion.jbof.nvme.fields import NvmeProtocolError
from tests.jbof.drives.recordings import Recording, of_kind


@pytest.mark.parametrize("recording", of_kind("smart"))
def test_health_as_nvme_cli_reads_it(recording: Recording) -> None:
    said = recording.said
    health = parse_health(recording.page)
    assert health.warnings == said["critical_warning"]
    assert health.temperature_c == said["temperature"] - 273
    assert (health.spare_percent, health.spare_threshold_percent) == (said["avail_spare"], said["spare_thresh"])
    assert health.percentage_used == said["percent_used"]
    assert health.read_bytes == int(said["data_units_read"]) * 512_000
    assert health.written_bytes == int(said["data_units_written"]) * 512_000
    assert health.power_cycles == int(said["power_cycles"])
    assert health.power_on_hours == int(said["power_on_hours"])
    assert health.unsafe_shutdowns == int(said["unsafe_shutdowns"])
    assert health.media_errors == int(said["media_errors"])
    assert health.error_log_entries == int(said["num_err_log_entries"])


@pytest.mark.parametrize("recording", of_kind("endurance_group"))
def test_endurance_group_as_nvme_cli_reads_it(recording: Recording) -> None:
    said = recording.said
    group = parse_endurance_group(recording.page)
    assert group.warnings == said["critical_warning"]
    assert (group.spare_percent, group.spare_threshold_percent) == (said["avl_spare"], said["avl_spare_threshold"])
    assert group.percentage_used == said["percent_used"]
    assert group.estimate_bytes == int(said["endurance_estimate"]) * 10**9
    assert group.read_bytes == int(said["data_units_read"]) * 10**9
    assert group.written_bytes == int(said["data_units_written"]) * 10**9
    assert group.media_written_bytes == int(said["media_units_written"]) * 10**9
    assert group.media_errors == int(said["media_data_integrity_err"])
    assert group.write_amplification == pytest.approx(
        int(said["media_units_written"]) / int(said["data_units_written"])
    )


def test_short_pages_are_refused() -> None:
    for parse in (parse_health, parse_endurance_group):
        with pytest.raises(NvmeProtocolError, match="511 bytes; 512 are needed"):
            parse(bytes(511))


def test_a_drive_without_a_thermometer() -> None:
    assert parse_health(bytes(LOG_BYTES)).temperature_c is None


def test_a_drive_that_is_read_only() -> None:
    health = parse_health(bytes([Warnings.READ_ONLY | Warnings.SPARE_LOW, 0, 0, 5, 10]) + bytes(LOG_BYTES - 5))
    assert health.is_read_only
    assert health.is_spare_low


def worn(percentage_used: int, power_on_hours: int) -> Health:
    page = bytearray(LOG_BYTES)
    page[5] = percentage_used
    page[128:144] = power_on_hours.to_bytes(16, "little")
    return parse_health(bytes(page))


def test_months_left_by_age() -> None:
    # 10 % in one year leave nine years.
    assert worn(10, 8766).months_left_by_age == pytest.approx(9 * 12)
    assert worn(50, 8766).months_left_by_age == pytest.approx(12)
    assert worn(100, 8766).months_left_by_age == 0
    assert worn(255, 8766).months_left_by_age == 0
    assert worn(0, 8766).months_left_by_age is None
    assert worn(10, 0).months_left_by_age is None


@given(st.binary(min_size=LOG_BYTES, max_size=LOG_BYTES))
def test_any_page_can_be_read(page: bytes) -> None:
    health = parse_health(page)
    assert health.months_left_by_age is None or health.months_left_by_age >= 0
    group = parse_endurance_group(page)
    assert group.write_amplification is None or group.write_amplification > 0
