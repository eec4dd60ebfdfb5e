"""Ranges into commands: every block once, in order, within every limit of NVM Figure 120."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.deallocation import split_ranges
from meshfusion.jbof.nvme.identify import NvmLimits
from meshfusion.jbof.nvme.io_commands import LbaRange


def limits(dmrl: int = 0, dmrsl: int = 0, dmsl: int = 0) -> NvmLimits:
    return NvmLimits(vsl=0, wzsl=0, wusl=0, dmrl=dmrl, dmrsl=dmrsl, dmsl=dmsl)


def test_without_limits_there_are_256_ranges_in_a_command() -> None:
    ranges = [LbaRange(10 * i, 5) for i in range(300)]
    for none in (None, limits()):
        assert [len(command) for command in split_ranges(ranges, none)] == [256, 44]


def test_every_limit() -> None:
    ranges = [LbaRange(0, 20), LbaRange(100, 3), LbaRange(200, 9)]
    assert split_ranges(ranges, limits(dmrsl=8)) == (
        (LbaRange(0, 8), LbaRange(8, 8), LbaRange(16, 4), LbaRange(100, 3), LbaRange(200, 8), LbaRange(208, 1)),
    )
    assert [len(command) for command in split_ranges(ranges, limits(dmrl=2))] == [2, 1]
    assert split_ranges(ranges, limits(dmsl=10)) == (
        (LbaRange(0, 10),),
        (LbaRange(10, 10),),
        (LbaRange(100, 3),),
        (LbaRange(200, 9),),
    )


def test_a_range_of_more_than_32_bits() -> None:
    """LLB has 32 bits (NVM Figure 46)."""
    [command] = split_ranges([LbaRange(5, 2**32 + 1)], None)
    assert command == (LbaRange(5, 2**32 - 1), LbaRange(4 + 2**32, 2))


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 200)), max_size=40),
    st.integers(0, 255),
    st.integers(0, 300),
    st.integers(0, 500),
)
def test_every_block_once(pairs: list[tuple[int, int]], dmrl: int, dmrsl: int, dmsl: int) -> None:
    ranges = [LbaRange(*pair) for pair in pairs]
    commands = split_ranges(ranges, limits(dmrl, dmrsl, dmsl))
    blocks = [lba for item in ranges for lba in range(item.lba, item.lba + item.lba_count)]
    found = [lba for command in commands for item in command for lba in range(item.lba, item.lba + item.lba_count)]
    assert found == blocks
    for command in commands:
        assert 1 <= len(command) <= (dmrl or 256)
        assert max(item.lba_count for item in command) <= (dmrsl or 300)
        assert sum(item.lba_count for item in command) <= (dmsl or 10**9)
