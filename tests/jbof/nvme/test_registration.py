"""What targets call registered memory: one rule for each kind, as it then stands in an SGL descriptor."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange, MemoryRange
from meshfusion.jbof.nvme.sgl import RemoteMemory, remote_data

lengths = st.integers(1, 1 << 24)
ranges = st.one_of(
    st.builds(AddressRange, st.integers(1, 2**47), lengths),
    st.builds(DmaBufRange, st.integers(3, 1000), st.integers(0, 2**40), lengths),
)


@given(ranges, st.data())
def test_descriptors_start_at_the_address_or_at_the_offset_in_the_dma_buf(
    memory: MemoryRange, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, memory.length_bytes - 1))
    length = data.draw(st.integers(1, min(memory.length_bytes - offset, 2**24 - 1)))
    region = RegisteredRegion(RemoteMemory(memory.first_iova, memory.length_bytes, 7), None, lambda: None)
    (address,) = struct.unpack_from("<Q", remote_data(region.part(offset, length).remote).sgl1)
    first = memory.address if isinstance(memory, AddressRange) else memory.offset_bytes
    assert address == first + offset


@pytest.mark.parametrize(
    ("memory", "iova"), [(AddressRange(0x7F00_0000_1000, 64), 0x7F00_0000_1000), (DmaBufRange(9, 0x1000, 64), 0x1000)]
)
def test_the_rule_of_each_kind(memory: MemoryRange, iova: int) -> None:
    assert memory.first_iova == iova
