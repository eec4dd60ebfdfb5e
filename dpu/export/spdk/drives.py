"""Drives of a DPU: the NVMe bdevs of SPDK, read with admin commands that SPDK passes on.

By ``bdev_get_bdevs`` and ``bdev_nvme_send_cmd`` (SPDK: doc/jsonrpc.md). The pages say more than SPDK's own reports, and
the same as through Linux' driver: a drive keeps its identity when it changes from one to the other.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from meshfusion.dpu.export.spdk.passthru import PassedOn, send_command, unknown_form
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.jbof.drives.domain import DomainMap, FailureDomain, Location
from meshfusion.jbof.drives.drive import Drive, DriveKind, Found, Passed, without_twins
from meshfusion.jbof.drives.pages import CSI_NVM, read_drive
from meshfusion.jbof.drives.reading import drive_of
from meshfusion.jbof.errors import MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.admin_commands import IDENTIFY_BYTES
from meshfusion.jbof.nvme.command import AdminOpcode
from meshfusion.jbof.nvme.fields import MAX_U16

_NSID_ALL: Final = 0xFFFFFFFF
_SQE: Final = struct.Struct("<BBHI32x6I")
_TIMEOUT_S: Final = 10.0
assert _SQE.size == 64


class SpdkDrives:
    """A :class:`~meshfusion.jbof.drives.drive.DriveSource`. ``rpc`` is connected; ``dpu``: this DPU's name."""

    def __init__(self, rpc: SpdkRpc, dpu: str, domains: DomainMap | None = None) -> None:
        self._rpc = rpc
        self._dpu = dpu
        self._domains = domains or DomainMap()

    def discover(self) -> Found:
        """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` for reports of a form that is not known, and what
        :meth:`~meshfusion.dpu.export.spdk.rpc.SpdkRpc.call` does.
        """
        controllers = self._controllers()
        drives, passed = [], []
        for bdev in self._rpc.call("bdev_get_bdevs", _TIMEOUT_S):
            try:
                name, paths = bdev["name"], bdev["driver_specific"].get("nvme", ())
                if not paths:
                    continue  # of another kind, or stacked on a drive
                drives.append(self._drive(name, paths, controllers))
            except MeshFusionError as error:
                passed.append(Passed(name, error.message, error.next_step))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise unknown_form(error) from error
        found = without_twins(drives)
        return Found(found.drives, (*passed, *found.passed))

    def _controllers(self) -> dict[str, str]:
        """Their names, by what tells one from another in a bdev's report."""
        try:
            return {
                _transport_key(path["trid"]): controller["name"]
                for controller in self._rpc.call("bdev_nvme_get_controllers", _TIMEOUT_S)
                for path in controller["ctrlrs"]
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise unknown_form(error) from error

    def _drive(self, bdev: str, paths: Any, controllers: dict[str, str]) -> Drive:
        trid, nsid = paths[0]["trid"], paths[0]["ns_data"]["id"]
        controller = controllers.get(_transport_key(trid))
        if controller is None:
            raise MediaError(f"SPDK lists no controller of {bdev}", next_step="Look again: it may just have gone.")
        transport = str(trid["trtype"]).lower()
        if transport != "pcie":
            raise UnsupportedError(
                f"{bdev} is attached over {transport}, not on this DPU's bus",
                next_step="Let the service at its target own it.",
            )
        reading = read_drive(SpdkPages(self._rpc, controller), nsid)
        address = str(trid["traddr"])
        found = FailureDomain(
            drive=reading.identity.serial or reading.identity.unique, port=address, dpu=self._dpu, enclosure=self._dpu
        )
        return drive_of(reading, DriveKind.SPDK, bdev, Location("", address, transport), found, self._domains)


class SpdkPages:
    """A :class:`~meshfusion.jbof.drives.pages.PageReader` for the controller that SPDK calls ``name``."""

    def __init__(self, rpc: SpdkRpc, name: str) -> None:
        self._rpc = rpc
        self._name = name

    def identify(self, cns: int, *, nsid: int = 0, csi: int = CSI_NVM) -> bytes:
        return self._admin(AdminOpcode.IDENTIFY, nsid, cns, csi << 24, IDENTIFY_BYTES).data

    def log_page(self, page: int, length_bytes: int, *, nsid: int = _NSID_ALL, group: int = 0) -> bytes:
        assert length_bytes % 4 == 0
        dwords = length_bytes // 4 - 1  # 0's based (Base Figure 198)
        cdw10, cdw11 = (dwords & MAX_U16) << 16 | page, group << 16 | dwords >> 16
        return self._admin(AdminOpcode.GET_LOG_PAGE, nsid, cdw10, cdw11, length_bytes).data

    def feature(self, feature: int, *, group: int = 0) -> int:
        return self._admin(AdminOpcode.GET_FEATURES, 0, feature, group, 0).result

    def _admin(self, opcode: AdminOpcode, nsid: int, cdw10: int, cdw11: int, read_bytes: int) -> PassedOn:
        sqe = _SQE.pack(opcode.value, 0, 0, nsid, cdw10, cdw11, 0, 0, 0, 0)
        return send_command(self._rpc, self._name, opcode, sqe, read_bytes=read_bytes)


def _transport_key(trid: Any) -> str:
    return "|".join(str(trid.get(name, "")).lower() for name in ("trtype", "traddr", "trsvcid", "subnqn"))
