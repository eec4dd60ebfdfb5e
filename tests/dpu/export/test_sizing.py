"""The arithmetic, against figures worked out by hand, and against what SPDK's sources demand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.export.spdk.sizing import MIB, Machine, size
from meshfusion.jbof.errors import ConfigError

GIB = 1024 * MIB


def test_the_example_in_the_docs() -> None:
    sizing = size(Machine(memory_bytes=8 * GIB, cores=8))
    # queues: 64 x 128 x 2 x 4096 = 64 MiB; reserve: 256 + 8 x 16 = 384 MiB; pools: 8192 - 448 = 7744 MiB
    assert sizing.small_pool_count == 7744 * MIB // 16 // 8192 == 61_952  # 484 MiB
    assert sizing.large_pool_count == 7260 * MIB // 135_168 == 56_320
    assert sizing.ios_at_once == 56_320 // 8 == 7_040
    assert (sizing.large_buffer_bytes, sizing.small_cache_count, sizing.large_cache_count) == (135_168, 128, 1760)


def test_a_larger_io_needs_larger_buffers() -> None:
    # 4 MiB / 16 = 256 KiB, more than SPDK's 132 KiB.
    sizing = size(Machine(memory_bytes=8 * GIB, cores=4, max_io_bytes=4 * MIB))
    assert sizing.large_buffer_bytes == 262_144
    assert sizing.iobuf_options()["large_bufsize"] == 262_144
    assert sizing.transport_options("rdma")["max_io_size"] == 4_194_304
    assert sizing.transport_options("rdma")["trtype"] == "RDMA"


def test_too_little_memory_is_refused_with_what_would_be_enough() -> None:
    machine = Machine(memory_bytes=448 * MIB, cores=8)
    with pytest.raises(ConfigError, match="448 MiB are too little for 8 cores") as caught:
        size(machine)
    enough_bytes = int(caught.value.next_step.split(" MiB")[0].split()[-1]) * MIB
    assert size(Machine(memory_bytes=enough_bytes, cores=8)).ios_at_once >= 4 * 8
    with pytest.raises(ConfigError):
        size(Machine(memory_bytes=enough_bytes - 16 * MIB, cores=8))


@pytest.mark.parametrize("max_io_bytes", [4096, 1_000_000, 3 * MIB, 32 * MIB, 0, -1])
def test_sizes_that_spdk_does_not_take(max_io_bytes: int) -> None:
    with pytest.raises(ConfigError, match="powers of two"):
        size(Machine(memory_bytes=8 * GIB, cores=1, max_io_bytes=max_io_bytes))


@pytest.mark.parametrize(("field", "value"), [("cores", 0), ("connections", 0), ("queue_depth", 1)])
def test_numbers_that_make_no_sense(field: str, value: int) -> None:
    machine = {"memory_bytes": 8 * GIB, "cores": 1, field: value}
    with pytest.raises(ConfigError, match=field):
        size(Machine(**machine))


@given(
    memory_mib=st.integers(64, 256 * 1024),
    cores=st.integers(1, 64),
    connections=st.integers(1, 4096),
    io_exponent=st.integers(13, 24),
)
def test_whatever_is_accepted_fits_and_spdk_takes_it(
    memory_mib: int, cores: int, connections: int, io_exponent: int
) -> None:
    machine = Machine(memory_mib * MIB, cores, connections, 1 << io_exponent)
    try:
        sizing = size(machine)
    except ConfigError:
        return
    pools_bytes = sizing.small_pool_count * 8192 + sizing.large_pool_count * sizing.large_buffer_bytes
    assert pools_bytes + connections * 128 * 2 * 4096 < machine.memory_bytes
    # lib/nvmf/rdma.c: sge_count; lib/thread/iobuf.c: minimum pools and alignment
    assert machine.max_io_bytes // sizing.large_buffer_bytes <= 16
    assert sizing.small_pool_count >= 64
    assert sizing.large_pool_count >= 8
    assert sizing.large_buffer_bytes % 4096 == 0
    # lib/nvmf/transport.c: caches that are larger than the pool are cut
    assert sizing.small_cache_count * cores <= sizing.small_pool_count
    assert sizing.large_cache_count * cores <= sizing.large_pool_count
