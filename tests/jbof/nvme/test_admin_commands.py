"""Commands of the admin queue, byte by byte, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme import admin_commands as admin
from meshfusion.jbof.nvme.command import Command, capsule
from meshfusion.jbof.nvme.fields import NvmeFieldError
from meshfusion.jbof.nvme.sgl import NO_DATA, DataPointer, RemoteMemory, capsule_data, remote_data, remote_data_list
from tests.jbof.nvme.layout import NULL_SGL, Descriptor, descriptor, dword


def room(length_bytes: int) -> DataPointer:
    return remote_data(RemoteMemory(0x7F0000001000, length_bytes, 0x01020304))


def sqe(cdw0: str, nsid: str, sgl: str, *dwords: str) -> bytes:
    """Base Figure 92: dwords 0 and 1, reserved and metadata pointer, SGL Entry 1, dwords 10 to 15."""
    data = bytes.fromhex(cdw0 + nsid + "00" * 16 + sgl + "".join(dwords))
    return data.ljust(64, b"\0")


PAGE = "001000000 07f0000 001000 04030201 40".replace(" ", "")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # Base Figures 308, 309, 311: CNS in bits 7:0 of dword 10, CSI in bits 31:24 of dword 11
        (admin.identify_controller(room(4096)), sqe("06400000", "00000000", PAGE, "01000000")),
        (admin.identify_namespace(7, room(4096)), sqe("06400000", "07000000", PAGE, "00000000")),
        (
            admin.identify_active_namespaces(room(4096), after_nsid=9),
            sqe("06400000", "09000000", PAGE, "02000000"),
        ),
        (admin.identify_namespace_descriptors(7, room(4096)), sqe("06400000", "07000000", PAGE, "03000000")),
        (admin.identify_nvm_limits(room(4096)), sqe("06400000", "00000000", PAGE, "06000000")),
        # Base Figures 384, 386, 444, 398, 392, 193
        (admin.set_queue_count(8), sqe("09400000", "00000000", NULL_SGL, "07000000", "07000700")),
        (admin.set_keep_alive_timeout(15000), sqe("09400000", "00000000", NULL_SGL, "0f000000", "983a0000")),
        (
            admin.set_async_events(
                admin.AsyncEvents.NAMESPACE_ATTRIBUTE | admin.AsyncEvents.ASYMMETRIC_NAMESPACE_ACCESS
            ),
            sqe("09400000", "00000000", NULL_SGL, "0b000000", "00090000"),
        ),
        (
            admin.set_async_events(admin.AsyncEvents.FIRMWARE_ACTIVATION),
            sqe("09400000", "00000000", NULL_SGL, "0b000000", "00020000"),
        ),
        (
            admin.get_feature(admin.Feature.KEEP_ALIVE_TIMER, select=admin.FeatureSelect.CAPABILITIES),
            sqe("0a400000", "00000000", NULL_SGL, "0f030000"),
        ),
        # Base Figure 142
        (admin.keep_alive(), sqe("18400000", "00000000", NULL_SGL)),
        (admin.async_event_request(), sqe("0c400000", "00000000", NULL_SGL)),
        # Base Figure 144: the queue in bits 15:0, the command in bits 31:16
        (admin.abort(3, 0x456), sqe("08400000", "00000000", NULL_SGL, "03005604")),
    ],
)
def test_vectors(command: Command, expected: bytes) -> None:
    assert command.sqe == expected
    assert command.in_capsule == b""
    assert command.capsule_bytes == 64


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # Base Figures 198 to 201. ANA, only groups, event kept, 123458h bytes from offset 0123456789abcdech
        (
            admin.get_log_page(
                admin.LogPage.ASYMMETRIC_NAMESPACE_ACCESS,
                room(0x123458),
                offset_bytes=0x0123456789ABCDEC,
                retain_event=True,
                specific=1,
            ),
            sqe(
                "02400000",
                "ffffffff",
                "00100000007f0000 583412 04030201 40",
                "0c81158d 04000000 eccdab89 67452301",
            ),
        ),
        (
            admin.get_log_page(admin.LogPage.CHANGED_NAMESPACES, room(4096)),
            sqe("02400000", "ffffffff", PAGE, "0400ff03"),
        ),
        (
            admin.get_log_page(admin.LogPage.ERROR_INFORMATION, room(64)),
            sqe("02400000", "ffffffff", "00100000007f0000 400000 04030201 40", "01000f00"),
        ),
    ],
)
def test_log_page_vectors(command: Command, expected: bytes) -> None:
    assert command.sqe == expected


def test_the_identifier_is_put_into_the_capsule() -> None:
    """Base Figure 91: bits 31:16 of dword 0."""
    command = admin.identify_controller(room(4096))
    assert capsule(command, 0x1234) == sqe("06403412", "00000000", PAGE, "01000000")
    assert capsule(command, 0xFFFE)[:4] == bytes.fromhex("0640feff")
    for command_id in (-1, 0xFFFF, 0x10000):
        with pytest.raises(NvmeFieldError, match="CID"):
            capsule(command, command_id)


@given(dwords=st.integers(1, (2**24 - 1) // 4), offset=st.integers(0, 2**62 - 1), rae=st.booleans())
def test_log_page_lengths_and_offsets_read_back(dwords: int, offset: int, rae: bool) -> None:
    command = admin.get_log_page(
        admin.LogPage.ERROR_INFORMATION, room(4 * dwords), offset_bytes=4 * offset, retain_event=rae
    )
    numd = (dword(command, 11) & 0xFFFF) << 16 | dword(command, 10) >> 16
    assert numd + 1 == dwords
    assert dword(command, 13) << 32 | dword(command, 12) == 4 * offset
    assert dword(command, 10) & 0xFFFF == (0x8001 if rae else 0x0001)
    assert descriptor(command.sqe) == Descriptor(0x7F0000001000, 4 * dwords, 0x01020304, 0x40)


@given(result=st.integers(0, 2**32 - 1))
def test_queue_counts(result: int) -> None:
    """Base Figure 445: two 0's based counts."""
    counts = admin.queue_counts(result)
    assert counts.submission == result % 65536 + 1
    assert counts.completion == result // 65536 + 1
    assert counts.pairs == min(counts.submission, counts.completion)


@given(pairs=st.integers(1, 65535))
def test_what_is_asked_for_is_what_a_target_would_grant(pairs: int) -> None:
    asked = dword(admin.set_queue_count(pairs), 11)
    assert admin.queue_counts(asked) == admin.QueueCounts(pairs, pairs)


def test_abort_result() -> None:
    """Base Figure 145: bit 0 set means that the command was not aborted."""
    assert admin.aborted(0)
    assert not admin.aborted(1)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: admin.identify_namespace(0, room(4096)), "NSID"),
        (lambda: admin.identify_namespace(0xFFFFFFFF, room(4096)), "NSID"),
        (lambda: admin.identify_namespace_descriptors(0, room(4096)), "NSID"),
        (lambda: admin.identify_active_namespaces(room(4096), after_nsid=0xFFFFFFFE), "NSID"),
        (lambda: admin.identify_active_namespaces(room(4096), after_nsid=-1), "NSID"),
        (lambda: admin.identify_controller(room(4095)), "Identify data"),
        (lambda: admin.identify_controller(NO_DATA), "Identify data"),
        (lambda: admin.identify_controller(capsule_data(bytes(4096))), "Identify data"),
        (lambda: admin.identify_controller(remote_data_list([RemoteMemory(0, 2048, 1)] * 2)), "Identify data"),
        (lambda: admin.get_log_page(admin.LogPage.ERROR_INFORMATION, NO_DATA), "log page data"),
        (lambda: admin.get_log_page(admin.LogPage.ERROR_INFORMATION, room(63)), "NUMD"),
        (lambda: admin.get_log_page(admin.LogPage.ERROR_INFORMATION, room(64), offset_bytes=2), "LPO"),
        (lambda: admin.get_log_page(admin.LogPage.ERROR_INFORMATION, room(64), offset_bytes=2**64), "LPO"),
        (lambda: admin.get_log_page(admin.LogPage.ERROR_INFORMATION, room(64), specific=0x80), "LSP"),
        (lambda: admin.get_log_page(admin.LogPage.ERROR_INFORMATION, room(64), nsid=2**32), "NSID"),
        (lambda: admin.set_queue_count(0), "number of queues"),
        (lambda: admin.set_queue_count(65536), "number of queues"),
        (lambda: admin.set_keep_alive_timeout(0), "KATO"),
        (lambda: admin.set_keep_alive_timeout(2**32), "KATO"),
        (lambda: admin.set_feature(admin.Feature.KEEP_ALIVE_TIMER, 2**32), "feature value"),
        (lambda: admin.abort(65536, 1), "SQID"),
        (lambda: admin.abort(1, 0xFFFF), "CID"),
    ],
)
def test_refusals_name_the_field(build: Callable[[], Command], field: str) -> None:
    with pytest.raises(NvmeFieldError) as caught:
        build()
    assert caught.value.field == field
