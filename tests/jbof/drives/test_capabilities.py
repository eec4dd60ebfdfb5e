from __future__ import annotations

import pytest

from meshfusion.jbof.drives.capabilities import (
    CTRATT_ENDURANCE_GROUPS,
    Capabilities,
    ReservationCapability,
    capabilities,
    endurance_group,
    total_capacity_bytes,
)
from meshfusion.jbof.drives.placement import Zones
from meshfusion.jbof.nvme.fields import NvmeProtocolError
from meshfusion.jbof.nvme.identify import parse_controller
from meshfusion.jbof.nvme.namespaces import DeallocatedRead, parse_namespace
from tests.jbof.drives.recordings import Recording, of_kind, page_of

CONTROLLERS = of_kind("controller")
NAMESPACES = of_kind("namespace")


def read(controller: bytes, namespace: bytes, zones: Zones | None = None) -> Capabilities:
    parsed = parse_namespace(namespace)
    assert parsed is not None
    return capabilities(parse_controller(controller), parsed, namespace, zones=zones)


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_as_nvme_cli_reads_it(controller: Recording, namespace: Recording) -> None:
    ctrl, ns = controller.said, namespace.said
    found = read(controller.page, namespace.page)
    used = ns["lbafs"][ns["flbas"] & 0xF]
    assert (found.lba_count, found.lba_bytes, found.metadata_bytes) == (ns["nsze"], 1 << used["ds"], used["ms"])
    assert found.capacity_bytes == ns["nsze"] << used["ds"]
    assert [(f.lba_bytes, f.metadata_bytes, f.rp) for f in found.formats] == [
        (1 << f["ds"], f["ms"], f["rp"]) for f in ns["lbafs"]
    ]
    assert found.can_deallocate == bool(ctrl["oncs"] & 4)
    assert found.has_volatile_write_cache == bool(ctrl["vwc"] & 1)
    assert (found.reservations or 0) == (ns["rescap"] if ctrl["oncs"] & 0x20 else 0)
    assert found.is_shared == bool(ns["nmic"] & 1)
    assert found.is_write_protected == bool(ns["nsattr"] & 1)
    assert found.endurance_group == (ns["endgid"] if ctrl["ctratt"] & 0x10 else 0)
    own = bool(ns["nsfeat"] & 2)
    assert found.atomic.lbas == (ns["nawun"] if own and ns["nawun"] else ctrl["awun"]) + 1
    assert found.atomic.power_fail_lbas == (ns["nawupf"] if own and ns["nawupf"] else ctrl["awupf"]) + 1
    assert found.atomic.boundary_lbas == (ns["nabsn"] + 1 if ns["nabsn"] else None)
    assert found.atomic.power_fail_boundary_lbas == (ns["nabspf"] + 1 if ns["nabspf"] else None)
    assert total_capacity_bytes(controller.page) == (int(ctrl["tnvmcap"]) or None)
    assert {0: DeallocatedRead.UNKNOWN, 1: DeallocatedRead.ZEROS, 2: DeallocatedRead.ONES}.get(
        ns["dlfeat"] & 7, DeallocatedRead.UNKNOWN
    ) is found.deallocated_read


@pytest.mark.parametrize("namespace", [r for r in NAMESPACES if "npwg" in r.said])
def test_hints_as_nvme_cli_reads_them(namespace: Recording) -> None:
    hints = read(CONTROLLERS[0].page, namespace.page).hints
    assert hints is not None
    names = ("npwg", "npwa", "npdg", "npda", "nows")
    values = [getattr(hints, name) for name in names]
    if namespace.said["nsfeat"] >> 4 & 3 == 2:
        values[2] = namespace.said["npdg"] + 1  # not read: it is elsewhere then
    assert values == [namespace.said[name] + 1 for name in names]


def test_no_hints_without_the_bits_that_announce_them() -> None:
    (recording,) = [r for r in NAMESPACES if r.said["nsfeat"] == 2]
    assert read(CONTROLLERS[0].page, recording.page).hints is None


def test_reservations_by_name() -> None:
    controller, namespace = bytearray(page_of("controller")), bytearray(page_of("namespace"))
    controller[520] |= 1 << 5
    namespace[31] = 0b0000_0011
    assert read(bytes(controller), bytes(namespace)).reservations == (
        ReservationCapability.PERSISTS | ReservationCapability.WRITE_EXCLUSIVE
    )
    namespace[31] = 0
    assert read(bytes(controller), bytes(namespace)).reservations is None


def test_what_cannot_hold_a_pool() -> None:
    qemu = [r for r in NAMESPACES if r.source == "QEMU 7.2"]
    controller = page_of("controller", "QEMU 7.2")
    assert read(controller, qemu[0].page).problem == ""
    assert "zoned" in read(controller, qemu[1].page, Zones(4096, None, None)).problem
    with_metadata = next(r for r in NAMESPACES if r.said["flbas"] == 2)
    assert "metadata" in read(controller, with_metadata.page).problem


def test_endurance_groups_only_where_the_controller_has_them() -> None:
    controller, namespace = bytearray(page_of("controller")), page_of("namespace")
    controller[96:100] = (0).to_bytes(4, "little")
    assert read(bytes(controller), namespace).endurance_group == 0
    controller[96:100] = CTRATT_ENDURANCE_GROUPS.to_bytes(4, "little")
    assert read(bytes(controller), namespace).endurance_group == endurance_group(namespace) != 0


def test_short_pages_are_refused() -> None:
    with pytest.raises(NvmeProtocolError):
        endurance_group(bytes(100))
    with pytest.raises(NvmeProtocolError):
        total_capacity_bytes(bytes(100))
