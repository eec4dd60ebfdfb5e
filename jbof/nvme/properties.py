"""Controller properties, read and written with Property Get and Set (Base 3.1.4)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from meshfusion.jbof.nvme.fields import MAX_U32, MAX_U64, check_int, protocol_error


class Property(NamedTuple):
    """Where a property lies. The fields are the first arguments of Property Get and Set."""

    offset: int
    size_bytes: int


# Base Figures 33 and 35
CAP: Final = Property(0x00, 8)
VS: Final = Property(0x08, 4)
CC: Final = Property(0x14, 4)
CSTS: Final = Property(0x1C, 4)

_TIMEOUT_UNIT_S: Final = 0.5
_SQE_BYTES_LOG2: Final = 6
_CQE_BYTES_LOG2: Final = 4


@dataclass(frozen=True, slots=True)
class Capabilities:
    """CAP (Base Figure 36).

    ``mqes``: entries of the largest queue, 0's based. ``to``: how long enabling and disabling may take, in 500 ms.
    ``css``: the supported command sets, a bit each. ``mpsmin``, ``mpsmax``: memory page sizes, 2^(12 + value) bytes.
    """

    mqes: int
    cqr: bool
    ams: int
    to: int
    dstrd: int
    nssrs: bool
    css: int
    mpsmin: int
    mpsmax: int
    crms: int

    @property
    def max_queue_depth(self) -> int:
        return self.mqes + 1

    @property
    def ready_timeout_s(self) -> float:
        """How long to wait for CSTS.RDY to follow CC.EN."""
        return self.to * _TIMEOUT_UNIT_S

    @property
    def min_page_bytes(self) -> int:
        """The unit of all sizes that a controller reports as powers of two, such as MDTS."""
        return 1 << 12 + self.mpsmin

    @property
    def supports_nvm(self) -> bool:
        """The NVM command set: alone (bit 0), or among several (bit 6)."""
        return bool(self.css & (1 << 0 | 1 << 6))


class CommandSets(enum.IntEnum):
    """CC.CSS (Base Figure 41)."""

    NVM = 0
    ALL = 6
    ADMIN_ONLY = 7


class Shutdown(enum.IntEnum):
    """CC.SHN: 3 is reserved."""

    NONE = 0
    NORMAL = 1
    ABRUPT = 2


@dataclass(frozen=True, slots=True)
class Configuration:
    """CC (Base Figure 41). The entry sizes are powers of two: 64 bytes of command, 16 of completion."""

    enable: bool
    css: CommandSets = CommandSets.NVM
    mps: int = 0
    shutdown: Shutdown = Shutdown.NONE
    iosqes: int = _SQE_BYTES_LOG2
    iocqes: int = _CQE_BYTES_LOG2


class ShutdownStatus(enum.IntEnum):
    """CSTS.SHST: 3 is reserved."""

    NORMAL_OPERATION = 0
    OCCURRING = 1
    COMPLETE = 2
    RESERVED = 3


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """CSTS (Base Figure 42). ``cfs``: the controller has failed and needs a reset."""

    rdy: bool
    cfs: bool
    shutdown: ShutdownStatus
    nssro: bool
    paused: bool


class Version(NamedTuple):
    """VS, and VER of the Identify Controller data (Base Figure 37)."""

    major: int
    minor: int
    tertiary: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}" + (f".{self.tertiary}" if self.tertiary else "")


def decode_cap(value: int) -> Capabilities:
    check_int("CAP", value, 0, MAX_U64)
    return Capabilities(
        mqes=value & 0xFFFF,
        cqr=bool(value >> 16 & 1),
        ams=value >> 17 & 0x3,
        to=value >> 24 & 0xFF,
        dstrd=value >> 32 & 0xF,
        nssrs=bool(value >> 36 & 1),
        css=value >> 37 & 0xFF,
        mpsmin=value >> 48 & 0xF,
        mpsmax=value >> 52 & 0xF,
        crms=value >> 59 & 0x3,
    )


def encode_cc(config: Configuration) -> int:
    """The value of CC. A host changes all but EN and SHN only while the controller is disabled."""
    return (
        config.enable
        | config.css << 4
        | check_int("MPS", config.mps, 0, 0xF) << 7
        | config.shutdown << 14
        | check_int("IOSQES", config.iosqes, 0, 0xF) << 16
        | check_int("IOCQES", config.iocqes, 0, 0xF) << 20
    )


def decode_cc(value: int) -> Configuration:
    """Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError` for values that are reserved."""
    check_int("CC", value, 0, MAX_U32)
    css, shn = value >> 4 & 0x7, value >> 14 & 0x3
    if css not in CommandSets.__members__.values() or shn not in Shutdown.__members__.values():
        raise protocol_error(f"CC is {value:#x}, with a reserved value in CSS ({css}) or SHN ({shn})")
    return Configuration(
        enable=bool(value & 1),
        css=CommandSets(css),
        mps=value >> 7 & 0xF,
        shutdown=Shutdown(shn),
        iosqes=value >> 16 & 0xF,
        iocqes=value >> 20 & 0xF,
    )


def decode_csts(value: int) -> ControllerStatus:
    check_int("CSTS", value, 0, MAX_U32)
    return ControllerStatus(
        rdy=bool(value & 1),
        cfs=bool(value >> 1 & 1),
        shutdown=ShutdownStatus(value >> 2 & 0x3),
        nssro=bool(value >> 4 & 1),
        paused=bool(value >> 5 & 1),
    )


def decode_version(value: int) -> Version:
    check_int("VS", value, 0, MAX_U32)
    return Version(value >> 16, value >> 8 & 0xFF, value & 0xFF)
