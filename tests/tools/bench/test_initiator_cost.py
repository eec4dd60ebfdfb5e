"""The target that does nothing, and the gaps of an engine's thread."""

from __future__ import annotations

import ctypes
import struct
import threading

from meshfusion.jbof.nvme.admin_commands import set_queue_count
from meshfusion.jbof.nvme.command import capsule
from meshfusion.jbof.nvme.completion import decode_completion
from meshfusion.jbof.nvme.identify import parse_controller
from meshfusion.jbof.nvme.io_commands import flush
from meshfusion.jbof.nvme.namespaces import parse_namespace, parse_namespace_list
from meshfusion.tools.bench.engine_gaps import ENGINES, gaps_of
from meshfusion.tools.bench.null_target import LBA_BYTES, NSID, answer


def identified(cns: int) -> bytes:
    memory = ctypes.create_string_buffer(4096)
    sqe = bytearray(64)
    sqe[0], sqe[40] = 0x06, cns
    struct.pack_into("<QQ", sqe, 24, ctypes.addressof(memory), 0x40 << 56 | 4096)
    response = answer(bytes(sqe))
    assert response is not None
    assert decode_completion(response).status.is_success
    return memory.raw


def test_the_null_target_is_one_that_we_take() -> None:
    controller = parse_controller(identified(0x01))
    assert controller.has_keyed_sgls
    assert (controller.cntrltype, controller.max_sgl_descriptors) == (1, 1)
    assert parse_namespace_list(identified(0x02)) == (NSID,)
    namespace = parse_namespace(identified(0x00))
    assert namespace is not None
    assert namespace.lba_bytes == LBA_BYTES


def test_its_answers_name_the_command() -> None:
    response = answer(capsule(flush(1), 0x1234))
    assert response is not None
    assert (decode_completion(response).command_id, decode_completion(response).status.is_success) == (0x1234, True)
    granted = answer(capsule(set_queue_count(3), 1))
    assert granted is not None
    assert decode_completion(granted).dword0 == 2 << 16 | 2  # Base Figure 354: 0's based
    assert answer(bytes([0x0C]) + bytes(63)) is None


def test_a_thread_that_keeps_the_global_lock_is_seen() -> None:
    """A C function called without letting the lock go: the gap is as long as it, for either engine."""
    for engine in ENGINES:
        keeping = threading.Timer(0.05, ctypes.PyDLL(None).usleep, [60_000])
        keeping.start()
        gaps = gaps_of(engine, 0.2)
        keeping.join()
        assert 50 < gaps.worst_ms < 190
        assert gaps.lost_share > 0.2
