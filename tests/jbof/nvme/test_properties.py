"""Controller properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.nvme.fields import NvmeFieldError, NvmeProtocolError
from meshfusion.jbof.nvme.properties import (
    CAP,
    CC,
    CSTS,
    VS,
    Capabilities,
    CommandSets,
    Configuration,
    ControllerStatus,
    Shutdown,
    ShutdownStatus,
    decode_cap,
    decode_cc,
    decode_csts,
    decode_version,
    encode_cc,
)

configurations = st.builds(
    Configuration,
    enable=st.booleans(),
    css=st.sampled_from(CommandSets),
    mps=st.integers(0, 15),
    shutdown=st.sampled_from(Shutdown),
    iosqes=st.integers(0, 15),
    iocqes=st.integers(0, 15),
)


def test_where_properties_lie() -> None:
    """Base Figure 33."""
    assert (CAP, VS, CC, CSTS) == ((0x00, 8), (0x08, 4), (0x14, 4), (0x1C, 4))


def test_capabilities() -> None:
    """Base Figure 36."""
    cap = decode_cap(0x084108351E05007F)
    assert cap == Capabilities(
        mqes=127, cqr=True, ams=2, to=30, dstrd=5, nssrs=True, css=0x41, mpsmin=1, mpsmax=4, crms=1
    )
    assert cap.max_queue_depth == 128
    assert cap.ready_timeout_s == 15.0
    assert cap.min_page_bytes == 8192
    assert cap.supports_nvm


@pytest.mark.parametrize(("css", "supported"), [(0x01, True), (0x40, True), (0x80, False), (0x00, False)])
def test_command_sets(css: int, supported: bool) -> None:
    """Base Figure 36: bit 37 is the NVM command set, bit 43 one or more sets, bit 44 none."""
    assert decode_cap(css << 37).supports_nvm is supported


@given(bit=st.integers(0, 63))
def test_each_bit_of_cap_is_in_its_field(bit: int) -> None:
    """Base Figure 36, as (field, lowest bit, highest bit)."""
    layout = [
        ("mqes", 0, 15),
        ("cqr", 16, 16),
        ("ams", 17, 18),
        ("to", 24, 31),
        ("dstrd", 32, 35),
        ("nssrs", 36, 36),
        ("css", 37, 44),
        ("mpsmin", 48, 51),
        ("mpsmax", 52, 55),
        ("crms", 59, 60),
    ]
    cap = decode_cap(1 << bit)
    expected = {name: 1 << bit - low if low <= bit <= high else 0 for name, low, high in layout}
    assert {name: int(getattr(cap, name)) for name, _, _ in layout} == expected


def test_configuration() -> None:
    """Base Figure 41. The first value is what brings a controller up."""
    assert encode_cc(Configuration(enable=True)) == 0x00460001
    shutting_down = Configuration(enable=True, css=CommandSets.ALL, mps=3, shutdown=Shutdown.NORMAL)
    assert encode_cc(shutting_down) == 0x004641E1
    assert encode_cc(Configuration(enable=False, shutdown=Shutdown.ABRUPT)) == 0x00468000


@given(config=configurations)
def test_configurations_round_trip(config: Configuration) -> None:
    assert decode_cc(encode_cc(config)) == config


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (Configuration(enable=True, mps=16), "MPS"),
        (Configuration(enable=True, iosqes=16), "IOSQES"),
        (Configuration(enable=True, iocqes=-1), "IOCQES"),
    ],
)
def test_refused_configurations(config: Configuration, field: str) -> None:
    with pytest.raises(NvmeFieldError) as caught:
        encode_cc(config)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [0x1 << 4, 0x5 << 4, 0x3 << 14])
def test_reserved_configurations(value: int) -> None:
    with pytest.raises(NvmeProtocolError, match="reserved"):
        decode_cc(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x00000029, ControllerStatus(True, False, ShutdownStatus.COMPLETE, nssro=False, paused=True)),
        (0x00000016, ControllerStatus(False, True, ShutdownStatus.OCCURRING, nssro=True, paused=False)),
        (0x00000000, ControllerStatus(False, False, ShutdownStatus.NORMAL_OPERATION, nssro=False, paused=False)),
    ],
)
def test_status(value: int, expected: ControllerStatus) -> None:
    """Base Figure 42."""
    assert decode_csts(value) == expected


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [(0x00010400, (1, 4, 0), "1.4"), (0x00010201, (1, 2, 1), "1.2.1"), (0x00020200, (2, 2, 0), "2.2")],
)
def test_version(value: int, expected: tuple[int, int, int], text: str) -> None:
    """Base Figures 37 and 38."""
    version = decode_version(value)
    assert version == expected
    assert str(version) == text


def test_values_have_their_size() -> None:
    for decode, value in [(decode_cap, 2**64), (decode_cc, 2**32), (decode_csts, 2**32), (decode_version, -1)]:
        with pytest.raises(NvmeFieldError):
            decode(value)
