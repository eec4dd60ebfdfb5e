"""Names, Connect data and Fabrics commands."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme import fabrics
from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.fields import NvmeFieldError
from meshfusion.jbof.nvme.properties import CAP, CC, CSTS
from meshfusion.jbof.nvme.sgl import NO_DATA, RemoteMemory, capsule_data, remote_data, remote_data_list
from tests.jbof.nvme.layout import NULL_SGL, filled, le

HOST_ID = uuid.UUID("10111213-1415-1617-1819-1a1b1c1d1e1f")
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:10111213-1415-1617-1819-1a1b1c1d1e1f"
SUBSYSTEM_NQN = "nqn.2016-06.io.spdk:cnode1"
DATA = remote_data(RemoteMemory(0x7F00AA00, 1024, 0x55667788))
DATA_SGL = "00aa007f00000000 000400 88776655 40"


def fabrics_sqe(kind: str, sgl: str, specific: str) -> bytes:
    """Base Figure 94: opcode 7Fh, PSDT 01b, identifier, type, reserved, SGL Entry 1, by type."""
    return bytes.fromhex("7f400000" + kind + "00" * 19 + sgl + specific).ljust(64, b"\0")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # Base Figure 546: RECFMT, QID, SQSIZE (0's based), CATTR, reserved, KATO
        (
            fabrics.connect(0, 32, DATA, keep_alive_timeout_ms=15000),
            fabrics_sqe("01", DATA_SGL, "0000 0000 1f00 00 00 983a0000"),
        ),
        (
            fabrics.connect(3, 128, DATA, disable_sq_flow_control=True),
            fabrics_sqe("01", DATA_SGL, "0000 0300 7f00 04 00 00000000"),
        ),
        # Base Figures 552 and 554: ATTRIB, reserved, OFST, VALUE
        (fabrics.property_get(*CAP), fabrics_sqe("04", NULL_SGL, "01 000000 00000000")),
        (fabrics.property_get(*CSTS), fabrics_sqe("04", NULL_SGL, "00 000000 1c000000")),
        (fabrics.property_set(*CC, 0x460001), fabrics_sqe("00", NULL_SGL, "00 000000 14000000 0100460000000000")),
        # nvmf_auth_send_command, nvmf_auth_receive_command of Linux: zero, SPSP0, SPSP1, SECP, TL or AL
        (fabrics.authentication_send(DATA), fabrics_sqe("05", DATA_SGL, "00 01 01 e9 00040000")),
        (fabrics.authentication_receive(DATA), fabrics_sqe("06", DATA_SGL, "00 01 01 e9 00040000")),
        # Base Figure 550: RECFMT
        (fabrics.disconnect(), fabrics_sqe("08", NULL_SGL, "0000")),
    ],
)
def test_vectors(command: Command, expected: bytes) -> None:
    assert command.sqe == expected
    assert command.in_capsule == b""


def test_connect_data() -> None:
    """Base Figure 547: HOSTID, CNTLID, SUBNQN at 256, HOSTNQN at 512."""
    expected = filled(
        1024,
        {
            0: "101112131415161718191a1b1c1d1e1f ffff",
            256: "6e716e2e323031362d30362e696f2e7370646b3a636e6f646531",
            512: "6e716e2e323031342d30382e6f72672e6e766d657870726573733a757569643a"
            "31303131313231332d313431352d313631372d313831392d316131623163316431653166",
        },
    )
    assert fabrics.connect_data(HOST_ID, HOST_NQN, SUBSYSTEM_NQN) == expected
    again = fabrics.connect_data(HOST_ID, HOST_NQN, SUBSYSTEM_NQN, controller_id=0x0102)
    assert again == expected[:16] + b"\x02\x01" + expected[18:]


def test_the_longest_names_fit() -> None:
    name = "nqn.2014-08.com.example:".ljust(223, "x")
    data = fabrics.connect_data(HOST_ID, name, name)
    assert data[256:512] == data[512:768] == name.encode() + bytes(33)
    assert not any(data[768:])


@pytest.mark.parametrize("controller_id", [-1, 0xFFF0, 0xFFFD, 0xFFFE, 0x10000])
def test_reserved_controller_ids_are_refused(controller_id: int) -> None:
    with pytest.raises(NvmeFieldError, match="CNTLID"):
        fabrics.connect_data(HOST_ID, HOST_NQN, SUBSYSTEM_NQN, controller_id=controller_id)


def test_connect_data_names_what_is_wrong() -> None:
    with pytest.raises(NvmeFieldError, match="HOSTID"):
        fabrics.connect_data(uuid.UUID(int=0), HOST_NQN, SUBSYSTEM_NQN)
    with pytest.raises(ConfigError, match="host NQN 'me'"):
        fabrics.connect_data(HOST_ID, "me", SUBSYSTEM_NQN)
    with pytest.raises(ConfigError, match="subsystem NQN 'you'"):
        fabrics.connect_data(HOST_ID, HOST_NQN, "you")


@pytest.mark.parametrize(
    "nqn",
    [
        # the examples of Base 4.7
        "nqn.2014-08.com.example:nvme:nvm-subsystem-sn-d78432",
        "nqn.2014-08.com.example:nvme.host.sys.xyz",
        "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
        "nqn.2014-08.org.nvmexpress:uuid:F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6",
        "nqn.2014-08.org.nvmexpress.discovery",
        "nqn.2016-06.io.spdk:cnode1",
        "nqn.2019-01.com.3par:a",
        "nqn.2019-12.org.a-b.c:Größe",
        "nqn.2014-08.com.example:" + "x" * 199,
        "nqn.2014-08." + "a" * 63 + ":x",
    ],
)
def test_valid_names(nqn: str) -> None:
    assert fabrics.check_nqn(nqn) == nqn


@pytest.mark.parametrize(
    ("nqn", "problem"),
    [
        ("", "form"),
        ("iqn.2014-08.com.example:x", "form"),
        ("NQN.2014-08.com.example:x", "form"),
        ("nqn.14-08.com.example:x", "form"),
        ("nqn.2014-13.com.example:x", "form"),
        ("nqn.2014-00.com.example:x", "form"),
        ("nqn.2014-08.com.example", "form"),  # no name
        ("nqn.2014-08.com.example:", "form"),
        ("nqn.2014-08.:x", "form"),
        ("nqn.2014-08.com..example:x", "form"),
        ("nqn.2014-08.com.-example:x", "form"),
        ("nqn.2014-08.com.example-:x", "form"),
        ("nqn.2014-08.com.exa_mple:x", "form"),
        ("nqn.2014-08." + "a" * 64 + ":x", "form"),
        ("nqn.2014-08.com.example:a\0b", "form"),
        ("nqn.2014-08.com.example:a\n", "form"),
        ("nqn.\u0662014-08.com.example:x", "form"),  # a digit, but no ASCII one
        ("nqn.2014-08.com.\u212aelvin:x", "form"),  # matches k when case is ignored
        ("nqn.2014-08.com.example:" + "x" * 200, "224 bytes"),
        ("nqn.2014-08.com.example:" + "ö" * 100, "224 bytes"),
        ("nqn.2014-08.com.example:\ud800", "UTF-8"),
        ("nqn.2014-08.org.nvmexpress:x", "org.nvmexpress"),
        ("nqn.2015-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "org.nvmexpress"),
        ("nqn.2014-08.org.nvmexpress:uuid:f81d4fae", "org.nvmexpress"),
        ("nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf60", "org.nvmexpress"),
        ("nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bfg", "org.nvmexpress"),
        ("nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765 00a0c91e6bf6", "org.nvmexpress"),
    ],
)
def test_invalid_names(nqn: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        fabrics.check_nqn(nqn, what="host NQN")
    assert caught.value.message.startswith("host NQN ")
    assert caught.value.next_step


@given(identity=st.uuids())
def test_names_made_from_a_uuid_are_valid(identity: uuid.UUID) -> None:
    nqn = fabrics.uuid_nqn(identity)
    assert fabrics.check_nqn(nqn) == f"nqn.2014-08.org.nvmexpress:uuid:{identity}"


@given(text=st.text(max_size=60))
def test_any_text_is_judged(text: str) -> None:
    """Valid or refused, never another error; and what is valid survives the wire."""
    nqn = f"nqn.2014-08.com.example:{text}"
    try:
        fabrics.check_nqn(nqn)
    except ConfigError:
        return
    field = fabrics.connect_data(HOST_ID, nqn, nqn)[256:512]
    assert field.split(b"\0", 1)[0].decode() == nqn


def test_connect_result() -> None:
    """Base Figures 548 and 549: CNTLID, AUTHREQ; SQHD FFFFh agrees to no flow control."""
    assert fabrics.connect_result(0x00020012, 0xFFFF) == fabrics.ConnectResult(
        controller_id=0x12, needs_authentication=True, needs_secure_channel=False, sq_flow_control=False
    )
    assert fabrics.connect_result(0x0004FFEF, 0) == fabrics.ConnectResult(
        controller_id=0xFFEF, needs_authentication=False, needs_secure_channel=True, sq_flow_control=True
    )


@pytest.mark.parametrize(
    ("result", "words"),
    [(0x00010100, "byte 256 of the Connect data"), (0x0000002A, "byte 42 of the Connect command")],
)
def test_connect_fault(result: int, words: str) -> None:
    """Base Figure 549: IPO in bytes 1:0, and whether it counts in the data in bit 0 of byte 2."""
    assert fabrics.connect_fault(result) == words


@given(offset=st.integers(0, 2**32 - 1), value=st.integers(0, 2**64 - 1))
def test_properties_read_back(offset: int, value: int) -> None:
    sqe = fabrics.property_set(offset, 8, value).sqe
    assert (sqe[40], le(sqe, 44, 4), le(sqe, 48, 8)) == (1, offset, value)
    sqe = fabrics.property_set(offset, 4, value >> 32).sqe
    assert (sqe[40], le(sqe, 44, 4), le(sqe, 48, 8)) == (0, offset, value >> 32)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: fabrics.connect(65535, 32, DATA), "QID"),
        (lambda: fabrics.connect(-1, 32, DATA), "QID"),
        (lambda: fabrics.connect(1, 1, DATA), "SQSIZE + 1"),
        (lambda: fabrics.connect(1, 65536, DATA), "SQSIZE + 1"),
        (lambda: fabrics.connect(0, 32, DATA), "KATO"),
        (lambda: fabrics.connect(0, 32, DATA, keep_alive_timeout_ms=2**32), "KATO"),
        (lambda: fabrics.connect(1, 32, DATA, keep_alive_timeout_ms=1), "KATO"),
        (lambda: fabrics.connect(1, 32, NO_DATA), "Connect data"),
        (lambda: fabrics.connect(1, 32, remote_data(RemoteMemory(0, 1023, 1))), "Connect data"),
        (lambda: fabrics.connect(1, 32, capsule_data(bytes(1024))), "Connect data"),
        (lambda: fabrics.connect(1, 32, remote_data_list([RemoteMemory(0, 512, 1)] * 2)), "Connect data"),
        (lambda: fabrics.authentication_send(NO_DATA), "authentication data"),
        (lambda: fabrics.authentication_receive(capsule_data(bytes(64))), "authentication data"),
        (lambda: fabrics.property_get(0, 2), "property size"),
        (lambda: fabrics.property_get(2**32, 4), "OFST"),
        (lambda: fabrics.property_set(0, 4, 2**32), "property value"),
        (lambda: fabrics.property_set(0, 8, 2**64), "property value"),
        (lambda: fabrics.property_set(0, 8, -1), "property value"),
    ],
)
def test_refusals_name_the_field(build: Callable[[], Command], field: str) -> None:
    with pytest.raises(NvmeFieldError) as caught:
        build()
    assert caught.value.field == field
