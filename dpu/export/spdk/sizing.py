"""How much memory of nvmf_tgt becomes what, for chunk I/O. Pure.

SPDK stores and forwards: every read or write passes through buffers in the target's memory, so that they bound how much
can be under way. All of them come from one pool of large buffers, shared by the transports, and the arithmetic is::

    large buffer      = max(132 KiB, max_io / 16 rounded up to 4 KiB) SPDK's own default is 132 KiB; an I/O has at most
                                                                      16 pieces
    buffers of an I/O = max_io / large buffer, rounded up             1 MiB: 8 buffers, 1056 KiB
    queues            = connections x depth x 2 x in-capsule size     capsules' data, and as much to receive into
    reserve           = 256 MiB + 16 MiB x cores                      programme, drives' queues, per-core caches
    pools             = memory - reserve - queues
    small pool        = pools / 16, in buffers of 8 KiB               admin data, labels, summaries
    large pool        = the rest of pools
    I/Os at once      = large pool / buffers of an I/O

Hosts may post more than that, since a request without buffers waits in the target. Fewer than 4 for each core make no
sense and are refused. A core keeps at most a quarter of its share of the pool to itself, or the others run dry.

An example, 8 GiB for 8 cores, 1 MiB I/O, 64 connections of depth 128: queues 64 MiB, reserve 384 MiB, small pool
484 MiB, large pool 56,320 buffers, 7,040 I/Os at once. At 50 GB/s these are used up in 150 ms if drives stall.

Sources: lib/nvmf/transport.c, lib/nvmf/{rdma,tcp}.c (max_io / large buffer may not exceed 16), lib/thread/iobuf.c
(defaults, minimum sizes, 4 KiB alignment), include/spdk/nvmf_transport.h, all of SPDK 26.09. The reserve is ours: an
nvmf_tgt (3230130e6a) needed 198 MiB beside its pools to start, with one core and with two, before it had any drive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshfusion.jbof.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB

SMALL_BUFFER_BYTES = 8 * KIB
MIN_LARGE_BUFFER_BYTES = 132 * KIB
MAX_BUFFERS_PER_IO = 16
BUFFER_ALIGNMENT_BYTES = 4 * KIB
MIN_SMALL_BUFFERS_PER_CORE = 512
"""Four modules cache up to 128 each: bdev, accel and the transports."""
RESERVE_BYTES = 256 * MIB
RESERVE_PER_CORE_BYTES = 16 * MIB
MIN_IOS_PER_CORE = 4
MIN_IO_BYTES, MAX_IO_BYTES = 8 * KIB, 16 * MIB


@dataclass(frozen=True, slots=True)
class Machine:
    """``memory_bytes``: what nvmf_tgt gets (huge pages, or its option ``-s``). ``connections``: queues of all hosts.

    ``max_io_bytes``: of one command; a power of two (SPDK), from which follows the MDTS that hosts see.
    """

    memory_bytes: int
    cores: int
    connections: int = 64
    max_io_bytes: int = MIB
    queue_depth: int = 128
    in_capsule_bytes: int = 4 * KIB


@dataclass(frozen=True, slots=True)
class Sizing:
    """What SPDK is told. Counts are of buffers; caches are for each core."""

    small_pool_count: int
    large_pool_count: int
    large_buffer_bytes: int
    small_cache_count: int
    large_cache_count: int
    max_io_bytes: int
    queue_depth: int
    in_capsule_bytes: int

    @property
    def ios_at_once(self) -> int:
        return self.large_pool_count // -(-self.max_io_bytes // self.large_buffer_bytes)

    def iobuf_options(self) -> dict[str, Any]:
        """Parameters of iobuf_set_options, which is possible only before framework_start_init."""
        return {
            "small_pool_count": self.small_pool_count,
            "large_pool_count": self.large_pool_count,
            "small_bufsize": SMALL_BUFFER_BYTES,
            "large_bufsize": self.large_buffer_bytes,
        }

    def transport_options(self, transport: str) -> dict[str, Any]:
        """Parameters of nvmf_create_transport."""
        return {
            "trtype": transport.upper(),
            "max_io_size": self.max_io_bytes,
            "max_queue_depth": self.queue_depth,
            "in_capsule_data_size": self.in_capsule_bytes,
            "iobuf_small_cache_size": self.small_cache_count,
            "iobuf_large_cache_size": self.large_cache_count,
        }


def size(machine: Machine) -> Sizing:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` when the memory is not enough, and names what would be."""
    _check(machine)
    large_bytes = max(MIN_LARGE_BUFFER_BYTES, _up(machine.max_io_bytes // MAX_BUFFERS_PER_IO))
    per_io = -(-machine.max_io_bytes // large_bytes)
    queues_bytes = machine.connections * machine.queue_depth * 2 * machine.in_capsule_bytes
    fixed_bytes = RESERVE_BYTES + RESERVE_PER_CORE_BYTES * machine.cores + queues_bytes
    pools_bytes = machine.memory_bytes - fixed_bytes
    small_count = max(MIN_SMALL_BUFFERS_PER_CORE * machine.cores, pools_bytes // 16 // SMALL_BUFFER_BYTES)
    large_count = (pools_bytes - small_count * SMALL_BUFFER_BYTES) // large_bytes
    if large_count < per_io * MIN_IOS_PER_CORE * machine.cores:
        large_needed = per_io * MIN_IOS_PER_CORE * machine.cores * large_bytes
        small_needed = MIN_SMALL_BUFFERS_PER_CORE * machine.cores * SMALL_BUFFER_BYTES
        needed = fixed_bytes + max(large_needed + small_needed, _up(large_needed * 16 // 15 + SMALL_BUFFER_BYTES))
        raise ConfigError(
            f"{machine.memory_bytes // MIB} MiB are too little for {machine.cores} cores and I/O of "
            f"{machine.max_io_bytes // KIB} KiB on {machine.connections} connections",
            next_step=f"Give nvmf_tgt at least {-(-needed // MIB)} MiB, or lower cores, connections or the I/O size.",
        )
    return Sizing(
        small_pool_count=small_count,
        large_pool_count=large_count,
        large_buffer_bytes=large_bytes,
        small_cache_count=min(128, small_count // machine.cores // 4),
        large_cache_count=max(per_io, large_count // machine.cores // 4),
        max_io_bytes=machine.max_io_bytes,
        queue_depth=machine.queue_depth,
        in_capsule_bytes=machine.in_capsule_bytes,
    )


def _check(machine: Machine) -> None:
    bytes_ = machine.max_io_bytes
    if not MIN_IO_BYTES <= bytes_ <= MAX_IO_BYTES or bytes_ & (bytes_ - 1):
        raise ConfigError(
            f"max_io_bytes is {bytes_}; SPDK takes powers of two, here from {MIN_IO_BYTES} to {MAX_IO_BYTES}",
            next_step="Use the power of two at or above the size of a chunk's shard.",
        )
    for name, low in (("cores", 1), ("connections", 1), ("queue_depth", 2), ("in_capsule_bytes", 0)):
        if getattr(machine, name) < low:
            raise ConfigError(f"{name} is {getattr(machine, name)}, less than {low}", next_step=f"Correct {name}.")


def _up(length_bytes: int) -> int:
    return -(-length_bytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
