"""Figures of a plan against sums that were done by hand, and what is said where something is not enough."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from meshfusion.dpu.export.spdk.sizing import Machine, size
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.tools.plan.capacity import room_in_segment
from meshfusion.tools.plan.checks import RULES
from meshfusion.tools.plan.formula import Unit
from meshfusion.tools.plan.given import BY_NAME
from meshfusion.tools.plan.model_form import form_of_bytes
from meshfusion.tools.plan.plan import FORMULAS, Plan, make_plan

FORM = form_of_bytes(131_072, block_tokens=16, rank_count=1, is_replicated=False, chunk_min_bytes=1 << 20)
GIVEN: dict[str, Any] = {
    "engines": 4, "requests_per_s": 10.0, "prompt_tokens": 4000.0, "output_tokens": 100.0, "hit_ratio": 0.5,
    "written_share": 0.5, "working_set_hours": 2.0, "prefill_tokens_per_s": 20_000.0, "queue_s": 0.1, "drives": 8,
    "drive_bytes": 3_840_000_000_000, "drive_read_rate": 6e9, "drive_write_rate": 2e9,
    "rated_drive_writes_per_day": 3.0, "nics": 2, "nic_rate": 25e9, "dpu_memory": 32 << 30,
}  # fmt: skip
MEDIUM_BYTES_PER_TOKEN = (16 * 131_072 + 4096) / 16


def plan(**changes: Any) -> Plan:
    return make_plan(FORM, {**GIVEN, **changes})


def failing(found: Plan) -> list[str]:
    return [check.rule.title for check in found.checks if not check.is_enough]


def test_reads_and_writes_by_hand() -> None:
    values = plan().values
    assert values["hit_tokens"] == 2000
    assert values["loaded_bytes_per_request"] == 2000 * 131_072
    assert values["loaded_bytes_per_s"] == 10 * 2000 * 131_072 == 2_621_440_000
    assert values["computed_tokens_per_s"] == 10 * (2000 + 100)
    saved = 21_000 * MEDIUM_BYTES_PER_TOKEN / 2
    assert values["saved_bytes_per_s"] == pytest.approx(saved)
    assert values["drive_reads"] == pytest.approx((2_621_440_000 + saved / 10) / 8)
    assert values["drive_writes"] == pytest.approx(saved * 1.1 / 8)
    assert values["nic_out"] == 1_310_720_000
    assert values["nic_in"] == pytest.approx(saved / 2)


def test_loading_and_computing_by_hand() -> None:
    """8 drives read 48 GB/s, two ports carry 50: 262 MB in 5.46 ms, and 5 ms before the first byte. A chunk of 16
    tokens takes 0.8 ms to compute and 0.0437 to load: 6.61 of them make up for the 5 ms."""
    values = plan().values
    assert values["load_rate"] == 48e9
    assert values["load_s"] == pytest.approx(0.005 + 262_144_000 / 48e9)
    assert values["recompute_s"] == pytest.approx(0.1)
    assert values["break_even"] == 7 * 16
    assert values["saved_engines"] == pytest.approx(1.0)
    assert plan(engine_nic_rate=12.5e9).values["load_rate"] == 12.5e9
    assert math.isinf(plan(nic_rate=1e6, nics=1).values["break_even"])


def test_ranks_share_what_loads_and_what_they_hold_alike_is_loaded_by_each() -> None:
    eight = form_of_bytes(131_072, block_tokens=16, rank_count=8, is_replicated=False, chunk_min_bytes=1 << 20)
    assert make_plan(eight, GIVEN).values["load_s"] == pytest.approx(0.005 + 2048 * 131_072 / 48e9)
    alike = form_of_bytes(131_072, block_tokens=16, rank_count=8, is_replicated=True, chunk_min_bytes=1 << 20)
    values = make_plan(alike, GIVEN).values
    assert values["load_s"] == pytest.approx(0.005 + 8 * 2000 * 131_072 / 48e9)
    assert values["loaded_bytes_per_s"] == 8 * 2_621_440_000
    assert values["saved_bytes_per_s"] == plan().values["saved_bytes_per_s"]


def test_room_by_hand() -> None:
    """A 2048th of 3.84 TB is 1,875,000,000 bytes, in whole MiB 1789. Behind the first MiB there are 2047 of them. One
    holds 457,984 blocks of 4096 bytes; without header and a summary of 892 entries in four blocks 892 shards of 513."""
    values = plan().values
    assert values["segment_bytes"] == 1789 << 20
    assert values["segments"] == 8 * 2047
    room = 8 * 2047 * 0.95 * 892 * 513 * 4096
    assert values["usable_bytes"] == pytest.approx(room)
    assert values["kept_tokens"] == pytest.approx(room / MEDIUM_BYTES_PER_TOKEN)
    assert values["needed_bytes"] == pytest.approx(values["saved_bytes_per_s"] * 7200)
    assert values["kept_hours"] == pytest.approx(room / values["saved_bytes_per_s"] / 3600)


def test_the_largest_shard_that_a_segment_holds_is_the_longest_extent_of_a_pool() -> None:
    geometry = SegmentGeometry(4096, 256, 512, 4)
    longest = geometry.max_extent_lba_count * 4096
    assert room_in_segment(geometry.segment_bytes, longest) == longest
    assert room_in_segment(geometry.segment_bytes, longest + 4096) == 0


def test_endurance_by_hand() -> None:
    """Three drive writes a day for five years of 365 days are 5475 of them; at 4.69 a day they last 1168 days."""
    values = plan().values
    assert values["rated_bytes"] == 5475 * 3_840_000_000_000
    per_day = values["saved_bytes_per_s"] * 1.1 / 8 * 86_400 / 3.84e12
    assert values["drive_writes_per_day"] == pytest.approx(per_day)
    assert values["life_months"] == pytest.approx(5475 / per_day / (365.25 / 12))
    assert plan(written_share=0.0).values["life_months"] == math.inf


def test_a_life_as_long_as_rated_is_enough_and_a_shorter_one_is_not() -> None:
    rating = plan().values["drive_writes_per_day"]
    assert "endurance of a drive" not in failing(plan(rated_drive_writes_per_day=rating))
    assert "endurance of a drive" in failing(plan(rated_drive_writes_per_day=rating * 0.999))
    assert "endurance of a drive" in failing(plan(rated_drive_writes_per_day=rating, device_write_amplification=1.01))


def test_memory_by_hand() -> None:
    values = plan().values
    records = values["kept_tokens"] / 16
    assert values["index_bytes"] == pytest.approx(records * 419)
    history = min(records, 8_388_608) * 20
    assert values["service_memory"] == pytest.approx(36e6 + 8 * 2047 * 403 + records * 14 + history)
    assert values["memory_needed"] == pytest.approx(values["service_memory"] + values["index_bytes"] + (8 << 30))


def test_the_measured_service_is_found_again() -> None:
    """Ten million chunks of 1 MiB in segments of 64 MiB took 94 to 100 MB before there was a policy, and 4.19 GB of
    index (docs/medium-performance.md)."""
    form = form_of_bytes(65_536, block_tokens=16, rank_count=1, is_replicated=False, chunk_min_bytes=1 << 20)
    values = make_plan(form, {"drives": 1, "drive_bytes": 158_731 * (64 << 20) + (1 << 20), "segment_bytes": 64 << 20,
                              "free_fraction": 0.0}).values  # fmt: skip
    assert values["segments"] == 158_731
    records = values["index_records"]
    assert records == 158_731 * 63, "each 1 MiB and a header: 63 in a segment"
    without_policy = values["service_memory"] - records * 14 - 8_388_608 * 20
    assert 94e6 <= without_policy <= 100.5e6
    assert values["index_bytes"] == pytest.approx(4.19e9, rel=0.01)


def test_the_target_by_its_own_sizing() -> None:
    """Four engines of one rank over two ports, four queues and one for the controller each: 40 connections."""
    values = plan().values
    assert values["target_connections"] == 40
    sizing = size(Machine(8 << 30, 1, connections=40))
    assert values["target_ios"] == sizing.ios_at_once
    bytes_per_s = values["loaded_bytes_per_s"] + values["saved_bytes_per_s"]
    assert values["target_stall_s"] == pytest.approx(sizing.ios_at_once * (1 << 20) / bytes_per_s)


def test_leases_and_lookups_by_hand() -> None:
    values = plan().values
    assert values["lookups_per_s"] == 10 * 250
    assert values["commits_per_s"] == 21_000 / 2 / 16
    assert values["service_processors"] == pytest.approx(2500 / 68_000 + 656.25 * 0.00059)
    assert values["leases_at_once"] == pytest.approx(10 * (0.1 + values["load_s"]))


SHORT: dict[str, dict[str, Any]] = {
    "room on the drives": {"working_set_hours": 50.0},
    "read rate of a drive": {"drive_read_rate": 400e6},
    "write rate of a drive": {"drive_write_rate": 200e6},
    "loads over a port": {"nic_rate": 1.8e9},
    "saves over a port": {"nic_rate": 0.9e9},
    "endurance of a drive": {"rated_drive_writes_per_day": 1.0},
    "memory of the DPU": {"dpu_memory": 8 << 30},
    "processor of the service": {"requests_per_s": 25.0},
}


def test_all_of_this_is_enough() -> None:
    found = plan(rated_drive_writes_per_day=5.0)
    assert [check.rule.title for check in found.checks] == [rule.title for rule in RULES]
    assert found.is_enough


@pytest.mark.parametrize("title", [rule.title for rule in RULES])
def test_what_is_not_enough_is_named(title: str) -> None:
    found = plan(**{"rated_drive_writes_per_day": 5.0, **SHORT[title]})
    assert title in failing(found)
    assert not found.is_enough


def test_a_rate_is_planned_with_in_part_and_room_as_a_whole() -> None:
    checks = {check.rule.title: check for check in plan(utilisation_max=0.5).checks}
    assert checks["read rate of a drive"].limit == 3e9
    assert checks["room on the drives"].limit == checks["room on the drives"].available


def test_a_target_without_enough_memory_is_told_with_the_way_out_and_the_rest_is_computed() -> None:
    found = plan(target_memory=256 << 20)
    (problem,) = found.problems
    assert "256 MiB are too little" in problem.message
    assert "Give nvmf_tgt at least" in problem.next_step
    assert not found.is_enough
    assert found.lacking == {"target_ios": ("target",), "target_stall_s": ("target",)}


def test_drives_that_no_pool_can_be_made_on_are_refused_by_option() -> None:
    with pytest.raises(ConfigError, match=r"^--drive-size: pool size 10MiB is too small"):
        plan(drive_bytes=10 << 20)
    with pytest.raises(ConfigError, match=r"^--segment-size: segment size 1000 is not"):
        plan(segment_bytes=1000)
    with pytest.raises(
        ConfigError, match=r"^--segment-size: a segment of 2MiB has no room for a shard of 2101248 bytes"
    ):
        plan(segment_bytes=2 << 20)


def test_without_drives_or_hits_the_model_is_told_and_what_is_lacking() -> None:
    found = make_plan(FORM, {})
    assert found.values["kv_bytes_per_token"] == 131_072
    assert found.lacking["loaded_bytes_per_s"] == ("requests_per_s", "prompt_tokens", "hit_ratio")
    assert found.lacking["segments"] == ("drives", "drive_bytes")
    assert found.checks == ()
    assert found.is_enough


@hypothesis_given(
    st.fixed_dictionaries(
        {
            "requests_per_s": st.floats(1e-3, 1e9), "prompt_tokens": st.floats(1e-3, 1e9),
            "hit_ratio": st.floats(0, 1), "written_share": st.floats(0, 1), "drives": st.integers(1, 1_000_000),
            "drive_bytes": st.integers(300 << 20, 1 << 60), "free_fraction": st.floats(0, 0.5),
            "engines": st.integers(1, 1_000_000), "prefill_tokens_per_s": st.floats(1e-3, 1e9),
        }
    )
)  # fmt: skip
def test_whatever_is_given_every_figure_is_a_number_of_0_or_more(changes: dict[str, Any]) -> None:
    try:
        found = plan(**changes)
    except ConfigError:
        return  # a drive of more segments than there are numbers for
    names = {entry.name for entry in FORMULAS} & found.values.keys()
    assert all(found.values[name] >= 0 for name in names)
    unbounded = {name for name in names if math.isinf(found.values[name])}
    assert unbounded <= {"break_even", "kept_hours", "life_months"}


def test_units_of_what_is_compared_are_the_same() -> None:
    units = {entry.name: entry.unit for entry in FORMULAS} | {name: entry.unit for name, entry in BY_NAME.items()}
    units["service_processors_available"] = Unit.COUNT
    assert all(units[rule.needed] is units[rule.available] for rule in RULES)
