"""What a controller says of itself (Base Figure 313, NVM Figure 120), and what follows from it for a host."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from meshfusion.jbof.nvme.admin_commands import IDENTIFY_BYTES
from meshfusion.jbof.nvme.command import SQE_BYTES
from meshfusion.jbof.nvme.fields import check_received, protocol_error
from meshfusion.jbof.nvme.properties import Capabilities, Version, decode_version
from meshfusion.jbof.nvme.sgl import DESCRIPTOR_BYTES, MAX_LIST_DESCRIPTORS

_CAPSULE_UNIT_BYTES: Final = 16
_KEEP_ALIVE_UNIT_MS: Final = 100
_NVM_LIMITS: Final = struct.Struct("<BBBBIQ")
# The fields that follow each other: vid to ver, and the ones from oaes on that are read.
_HEAD: Final = struct.Struct("<HH20s40s8sB3sBBHI")
_COMMAND_SET: Final = struct.Struct("<BBHIHHBBHH")  # from 512
_FABRICS: Final = struct.Struct("<IIHBBH")  # from 1792
assert _HEAD.size == 84


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """Fields of Base Figure 313 under their names there; the number behind each is its first byte.

    ``sn`` (4), ``mn`` (24), ``fr`` (64) without their padding. ``mdts`` (77): 2^n memory pages, 0 for no limit.
    ``kas`` (320): granularity of the keep-alive timer in 100 ms, 0 for no keep-alive. ``aerl`` (259), ``acl`` (258):
    0's based. ``anatt`` (342): longest ANA transition in s. ``ioccsz`` (1792), ``iorcsz`` (1796), ``icdoff`` (1800):
    in 16 bytes. ``msdbd`` (1803): 0 for no limit.
    """

    vid: int  # 0
    ssvid: int  # 2
    sn: str
    mn: str
    fr: str
    cmic: int  # 76
    mdts: int
    cntlid: int  # 78
    ver: Version  # 80
    oaes: int  # 92
    ctratt: int  # 96
    cntrltype: int  # 111
    acl: int
    aerl: int
    elpe: int  # 262, 0's based
    kas: int
    anatt: int
    anacap: int  # 343
    anagrpmax: int  # 344
    nanagrpid: int  # 348
    sqes: int  # 512
    cqes: int  # 513
    maxcmd: int  # 514
    nn: int  # 516
    oncs: int  # 520
    vwc: int  # 525
    awun: int  # 526, 0's based
    awupf: int  # 528, 0's based
    sgls: int  # 536
    mnan: int  # 540
    subnqn: str  # 768
    ioccsz: int
    iorcsz: int
    icdoff: int
    fcatt: int  # 1802
    msdbd: int
    ofcs: int  # 1804

    @property
    def has_keyed_sgls(self) -> bool:
        """Without them there is no NVMe/RDMA."""
        return bool(self.sgls & 0x3) and bool(self.sgls >> 2 & 1)

    @property
    def has_volatile_write_cache(self) -> bool:
        """If not, a completed write is durable, and Flush and FUA cost nothing."""
        return bool(self.vwc & 1)

    @property
    def flushes_all_namespaces(self) -> bool:
        """Flush takes NSID FFFFFFFFh (bits 2:1 of VWC are 11b)."""
        return self.vwc >> 1 & 0x3 == 0x3

    @property
    def has_dataset_management(self) -> bool:
        return bool(self.oncs >> 2 & 1)

    @property
    def has_write_zeroes(self) -> bool:
        return bool(self.oncs >> 3 & 1)

    @property
    def has_data_placement(self) -> bool:
        """Flexible Data Placement: bit 19 of CTRATT. Whether it is enabled where a namespace lies, that one tells."""
        return bool(self.ctratt >> 19 & 1)

    @property
    def has_reservations(self) -> bool:
        return bool(self.oncs >> 5 & 1)

    @property
    def reports_ana(self) -> bool:
        """Asymmetric Namespace Access: bit 3 of CMIC."""
        return bool(self.cmic >> 3 & 1)

    @property
    def has_disconnect(self) -> bool:
        """The Disconnect command, and deletion of single I/O queues: bit 0 of OFCS."""
        return bool(self.ofcs & 1)

    @property
    def max_async_event_requests(self) -> int:
        return self.aerl + 1

    @property
    def max_aborts(self) -> int:
        return self.acl + 1

    @property
    def keep_alive_unit_ms(self) -> int:
        """The timeout is rounded up to a multiple of this; 0: there is no keep-alive."""
        return self.kas * _KEEP_ALIVE_UNIT_MS

    @property
    def max_capsule_data_bytes(self) -> int:
        """Room for data in the capsule of an I/O command; 0 if data cannot travel there (bit 20 of SGLS)."""
        if not self.sgls >> 20 & 1:
            return 0
        return max(0, self.ioccsz * _CAPSULE_UNIT_BYTES - SQE_BYTES - self.capsule_data_offset_bytes)

    @property
    def capsule_data_offset_bytes(self) -> int:
        """Where such data begins, behind the submission queue entry."""
        return self.icdoff * _CAPSULE_UNIT_BYTES

    @property
    def max_sgl_descriptors(self) -> int:
        """How many keyed descriptors an I/O command may have: at least 1, at most 16.

        A list takes room in the capsule, and MSDBD bounds it.
        """
        fitting = (self.ioccsz * _CAPSULE_UNIT_BYTES - SQE_BYTES) // DESCRIPTOR_BYTES
        return max(1, min(fitting, self.msdbd or MAX_LIST_DESCRIPTORS, MAX_LIST_DESCRIPTORS))

    def max_transfer_bytes(self, cap: Capabilities) -> int | None:
        """The most bytes that one command may move; None: the controller sets no limit."""
        return cap.min_page_bytes << self.mdts if self.mdts else None


@dataclass(frozen=True, slots=True)
class NvmLimits:
    """NVM Figure 120: limits of single commands, 0 where there is none.

    ``wzsl``: Write Zeroes moves at most 2^n memory pages. ``dmrl``: ranges of a Dataset Management command that are
    heeded; ``dmrsl``: blocks of each range; ``dmsl``: blocks of all its ranges together.
    """

    vsl: int
    wzsl: int
    wusl: int
    dmrl: int
    dmrsl: int
    dmsl: int

    def max_write_zeroes_bytes(self, cap: Capabilities) -> int | None:
        """None: nothing but the transfer limit of the controller is set."""
        return cap.min_page_bytes << self.wzsl if self.wzsl else None


def parse_controller(data: bytes) -> ControllerInfo:
    """From Identify, CNS 01h. Raises :class:`~meshfusion.jbof.nvme.fields.NvmeProtocolError`."""
    check_received("the Identify Controller data", data, IDENTIFY_BYTES)
    vid, ssvid, sn, mn, fr, _rab, _ieee, cmic, mdts, cntlid, ver = _HEAD.unpack_from(data)
    oaes, ctratt = struct.unpack_from("<II", data, 92)
    anatt, anacap, anagrpmax, nanagrpid = struct.unpack_from("<BBII", data, 342)
    sqes, cqes, maxcmd, nn, oncs, _fuses, _fna, vwc, awun, awupf = _COMMAND_SET.unpack_from(data, 512)
    sgls, mnan = struct.unpack_from("<II", data, 536)
    ioccsz, iorcsz, icdoff, fcatt, msdbd, ofcs = _FABRICS.unpack_from(data, 1792)
    return ControllerInfo(
        vid=vid,
        ssvid=ssvid,
        sn=_text(sn),
        mn=_text(mn),
        fr=_text(fr),
        cmic=cmic,
        mdts=mdts,
        cntlid=cntlid,
        ver=decode_version(ver),
        oaes=oaes,
        ctratt=ctratt,
        cntrltype=data[111],
        acl=data[258],
        aerl=data[259],
        elpe=data[262],
        kas=int.from_bytes(data[320:322], "little"),
        anatt=anatt,
        anacap=anacap,
        anagrpmax=anagrpmax,
        nanagrpid=nanagrpid,
        sqes=sqes,
        cqes=cqes,
        maxcmd=maxcmd,
        nn=nn,
        oncs=oncs,
        vwc=vwc,
        awun=awun,
        awupf=awupf,
        sgls=sgls,
        mnan=mnan,
        subnqn=_nqn(data[768:1024]),
        ioccsz=ioccsz,
        iorcsz=iorcsz,
        icdoff=icdoff,
        fcatt=fcatt,
        msdbd=msdbd,
        ofcs=ofcs,
    )


def parse_nvm_limits(data: bytes) -> NvmLimits:
    """From Identify, CNS 06h of the NVM command set. Raises :class:`NvmeProtocolError`."""
    check_received("the NVM Identify Controller data", data, IDENTIFY_BYTES)
    return NvmLimits(*_NVM_LIMITS.unpack_from(data))


def _text(field: bytes) -> str:
    """ASCII, left-justified and padded with spaces (Base 1.4.2); some targets pad with zeros."""
    return field.rstrip(b" \0").decode("ascii", "replace")


def _nqn(field: bytes) -> str:
    try:
        return field.split(b"\0", 1)[0].decode()
    except UnicodeDecodeError:
        raise protocol_error("the subsystem NQN in the Identify Controller data is not UTF-8") from None
