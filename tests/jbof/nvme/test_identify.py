"""Identify Controller data."""

from __future__ import annotations

import random
import struct
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.fields import NvmeProtocolError
from meshfusion.jbof.nvme.identify import ControllerInfo, NvmLimits, parse_controller, parse_nvm_limits
from meshfusion.jbof.nvme.properties import Version, decode_cap
from tests.jbof.nvme.layout import filled

# Base Figure 313, as SPDK's target fills it, with more of its fields set.
CONTROLLER = filled(
    4096,
    {
        0: "8680 b315 5350444b303030303030303030303030303120 20"  # VID, SSVID, SN
        "5350444b206264657620436f6e74726f6c6c6572 2020202020202020202020202020202020202020"  # MN
        "32362e3039202020 06 e4d25c 0a 05 0201 00040100",  # FR, RAB, IEEE, CMIC, MDTS, CNTLID, VER
        93: "09 0000 41",  # OAES bits 8 and 11; CTRATT bits 0 and 6
        111: "01",
        256: "0800 03 03 00 00 7f",  # OACS, ACL, AERL, FRMW, LPA, ELPE
        320: "6400",  # KAS
        342: "0a 47 20000000 1f000000",  # ANATT, ANACAP, ANAGRPMAX, NANAGRPID
        512: "66 44 8000 21000000 2c00 0000 00 07 0700 0100",  # SQES to AWUPF
        536: "05001000 41000000",  # SGLS bits 0, 2, 20; MNAN
        768: "6e716e2e323031362d30362e696f2e7370646b3a636e6f646531",
        1792: "04010000 01000000 0000 01 10 0100",  # IOCCSZ, IORCSZ, ICDOFF, FCATT, MSDBD, OFCS
    },
)
CAP_4K = decode_cap(0)
CAP_8K = decode_cap(1 << 48)


def changed(parts: dict[int, str], data: bytes = CONTROLLER) -> ControllerInfo:
    changed_data = bytearray(data)
    for offset, text in parts.items():
        value = bytes.fromhex(text)
        changed_data[offset : offset + len(value)] = value
    return parse_controller(bytes(changed_data))


def test_controller() -> None:
    assert parse_controller(CONTROLLER) == ControllerInfo(
        vid=0x8086,
        ssvid=0x15B3,
        sn="SPDK00000000000001",
        mn="SPDK bdev Controller",
        fr="26.09",
        cmic=0x0A,
        mdts=5,
        cntlid=0x0102,
        ver=Version(1, 4, 0),
        oaes=0x900,
        ctratt=0x41,
        cntrltype=1,
        acl=3,
        aerl=3,
        elpe=127,
        kas=100,
        anatt=10,
        anacap=0x47,
        anagrpmax=32,
        nanagrpid=31,
        sqes=0x66,
        cqes=0x44,
        maxcmd=128,
        nn=33,
        oncs=0x2C,
        vwc=7,
        awun=7,
        awupf=1,
        sgls=0x00100005,
        mnan=65,
        subnqn="nqn.2016-06.io.spdk:cnode1",
        ioccsz=260,
        iorcsz=1,
        icdoff=0,
        fcatt=1,
        msdbd=16,
        ofcs=1,
    )
    assert str(parse_controller(CONTROLLER).ver) == "1.4"


def test_what_follows_from_it() -> None:
    info = parse_controller(CONTROLLER)
    assert info.has_keyed_sgls
    assert info.has_volatile_write_cache
    assert info.flushes_all_namespaces
    assert info.has_dataset_management
    assert info.has_write_zeroes
    assert info.has_reservations
    assert info.reports_ana
    assert info.has_disconnect
    assert info.max_async_event_requests == 4
    assert info.max_aborts == 4
    assert info.keep_alive_unit_ms == 10_000
    assert info.max_capsule_data_bytes == 4096
    assert info.capsule_data_offset_bytes == 0
    assert info.max_sgl_descriptors == 16


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({536: "01"}, "has_keyed_sgls"),
        ({536: "04"}, "has_keyed_sgls"),  # keyed, but bits 1:0 say that there are no SGLs
        ({525: "06"}, "has_volatile_write_cache"),
        ({525: "05"}, "flushes_all_namespaces"),  # bits 2:1 are 10b: it does not
        ({525: "01"}, "flushes_all_namespaces"),  # it does not say
        ({520: "28"}, "has_dataset_management"),
        ({520: "24"}, "has_write_zeroes"),
        ({520: "0c"}, "has_reservations"),
        ({76: "02"}, "reports_ana"),
        ({1804: "00"}, "has_disconnect"),
        ({538: "00"}, "max_capsule_data_bytes"),  # no offsets in SGLs
    ],
)
def test_what_a_missing_bit_takes_away(parts: dict[int, str], name: str) -> None:
    assert getattr(parse_controller(CONTROLLER), name)
    assert not getattr(changed(parts), name)


@pytest.mark.parametrize(
    ("ioccsz", "icdoff", "msdbd", "capsule_data_bytes", "descriptors"),
    [
        (4, 0, 16, 0, 1),  # no room behind the entry
        (5, 0, 16, 16, 1),
        (8, 0, 16, 64, 4),  # room for four
        (260, 0, 1, 4096, 1),  # as Linux' target says
        (260, 0, 0, 4096, 16),  # no limit: ours
        (260, 0, 255, 4096, 16),
        (260, 2, 16, 4064, 16),
        (5, 2, 16, 0, 1),
        (0, 0, 0, 0, 1),
    ],
)
def test_capsules(ioccsz: int, icdoff: int, msdbd: int, capsule_data_bytes: int, descriptors: int) -> None:
    """Base Figure 313: IOCCSZ and ICDOFF count 16 bytes; the entry takes 64."""
    info = changed({1792: struct.pack("<IIHBB", ioccsz, 1, icdoff, 0, msdbd).hex()})
    assert info.max_capsule_data_bytes == capsule_data_bytes
    assert info.capsule_data_offset_bytes == 16 * icdoff
    assert info.max_sgl_descriptors == descriptors


@pytest.mark.parametrize(
    ("mdts", "size_4k", "size_8k"),
    [("00", None, None), ("01", 8192, 16384), ("05", 131072, 262144), ("08", 1 << 20, 1 << 21)],
)
def test_max_transfer(mdts: str, size_4k: int | None, size_8k: int | None) -> None:
    """Base Figure 313: MDTS is a power of two of the smallest memory page (CAP.MPSMIN)."""
    info = changed({77: mdts})
    assert info.max_transfer_bytes(CAP_4K) == size_4k
    assert info.max_transfer_bytes(CAP_8K) == size_8k


def test_text_is_without_padding() -> None:
    info = changed({4: "2041422000" + "00" * 15, 24: "20" * 40, 64: "ff" + "20" * 7})
    assert (info.sn, info.mn, info.fr) == (" AB", "", "\ufffd")


def test_an_nqn_that_fills_its_field() -> None:
    assert changed({768: "78" * 256}).subnqn == "x" * 256
    with pytest.raises(NvmeProtocolError, match="UTF-8"):
        changed({768: "ff"})


# Base Figure 313, field by field: first byte and size. Bytes of other fields must not matter.
LAYOUT = {
    "vid": (0, 2),
    "ssvid": (2, 2),
    "cmic": (76, 1),
    "mdts": (77, 1),
    "cntlid": (78, 2),
    "oaes": (92, 4),
    "ctratt": (96, 4),
    "cntrltype": (111, 1),
    "acl": (258, 1),
    "aerl": (259, 1),
    "elpe": (262, 1),
    "kas": (320, 2),
    "anatt": (342, 1),
    "anacap": (343, 1),
    "anagrpmax": (344, 4),
    "nanagrpid": (348, 4),
    "sqes": (512, 1),
    "cqes": (513, 1),
    "maxcmd": (514, 2),
    "nn": (516, 4),
    "oncs": (520, 2),
    "vwc": (525, 1),
    "awun": (526, 2),
    "awupf": (528, 2),
    "sgls": (536, 4),
    "mnan": (540, 4),
    "ioccsz": (1792, 4),
    "iorcsz": (1796, 4),
    "icdoff": (1800, 2),
    "fcatt": (1802, 1),
    "msdbd": (1803, 1),
    "ofcs": (1804, 2),
}


@given(seed=st.integers(0))
def test_fields_are_where_the_figure_says(seed: int) -> None:
    page = bytearray(random.Random(seed).randbytes(4096))
    page[768:1024] = bytes(256)
    info = asdict(parse_controller(bytes(page)))
    for name, (offset, size) in LAYOUT.items():
        assert info[name] == int.from_bytes(page[offset : offset + size], "little"), name
    assert info["ver"] == (page[82] | page[83] << 8, page[81], page[80])
    assert set(info) == set(LAYOUT) | {"sn", "mn", "fr", "ver", "subnqn"}


def test_nvm_limits() -> None:
    """NVM Figure 120: VSL, WZSL, WUSL, DMRL, DMRSL, DMSL."""
    limits = parse_nvm_limits(filled(4096, {0: "01 05 02 ff 04030201 8877665544332211"}))
    assert limits == NvmLimits(vsl=1, wzsl=5, wusl=2, dmrl=255, dmrsl=0x01020304, dmsl=0x1122334455667788)
    assert limits.max_write_zeroes_bytes(CAP_8K) == 262144
    assert parse_nvm_limits(bytes(4096)).max_write_zeroes_bytes(CAP_4K) is None


@pytest.mark.parametrize("length_bytes", [0, 1803, 4095])
def test_truncated(length_bytes: int) -> None:
    with pytest.raises(NvmeProtocolError, match=f"{length_bytes} bytes"):
        parse_controller(CONTROLLER[:length_bytes])
    with pytest.raises(NvmeProtocolError, match=f"{length_bytes} bytes"):
        parse_nvm_limits(bytes(length_bytes))
