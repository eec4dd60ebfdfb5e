"""Reading what a controller offers: its namespaces and how it reaches them. Procedures, used at bring-up and after."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.admin_commands import (
    IDENTIFY_BYTES,
    LogPage,
    get_log_page,
    identify_active_namespaces,
    identify_namespace,
    identify_namespace_descriptors,
)
from meshfusion.jbof.nvme.identify import ControllerInfo
from meshfusion.jbof.nvme.logs import AnaLog, AnaState, max_ana_log_bytes, parse_ana_log
from meshfusion.jbof.nvme.namespaces import (
    NAMESPACE_LIST_ENTRIES,
    NamespaceIds,
    NamespaceInfo,
    parse_namespace,
    parse_namespace_descriptors,
    parse_namespace_list,
)
from meshfusion.jbof.nvme.procedures import Ask, Procedure
from meshfusion.jbof.nvme.status import NvmeCommandError
from meshfusion.jbof.nvme.transport import SCRATCH_BYTES

MAX_NAMESPACES: Final = 4096  # our bound


@dataclass(frozen=True, slots=True)
class Namespace:
    """``problem``: why it cannot be used by us, or None."""

    nsid: int
    info: NamespaceInfo
    ids: NamespaceIds
    problem: str | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """``ana`` is None for a controller without Asymmetric Namespace Access: it reaches all in the best way."""

    namespaces: Mapping[int, Namespace] = field(default_factory=lambda: MappingProxyType({}))
    ana: AnaLog | None = None

    def ana_state(self, nsid: int) -> AnaState | None:
        """None: this controller does not say how it reaches the namespace, or has none of this number."""
        if nsid not in self.namespaces:
            return None
        return AnaState.OPTIMIZED if self.ana is None else self.ana.state_of(nsid)

    @property
    def is_changing(self) -> bool:
        """Is some group on its way from one state to another?"""
        return self.ana is not None and any(group.state is AnaState.CHANGE for group in self.ana.groups)

    def differences(self, before: Inventory) -> frozenset[int]:
        """Namespaces that came, went or are different, or are reached in another way."""
        nsids = self.namespaces.keys() | before.namespaces.keys()
        return frozenset(nsid for nsid in nsids if self._compared(nsid) != before._compared(nsid))

    def _compared(self, nsid: int) -> tuple[NamespaceInfo, NamespaceIds, AnaState | None] | None:
        namespace = self.namespaces.get(nsid)
        if namespace is None:
            return None
        # How much of it is in use changes with every write.
        return replace(namespace.info, nuse=0), namespace.ids, self.ana_state(nsid)


def read_inventory(controller: ControllerInfo, min_page_bytes: int) -> Procedure[Inventory]:
    """Everything. ``min_page_bytes``: of the controller's CAP."""
    # Reading the log first clears it: what changes from here on is announced again.
    with suppress(NvmeCommandError):  # a controller without this log
        yield Ask(partial(get_log_page, LogPage.CHANGED_NAMESPACES), IDENTIFY_BYTES)
    namespaces = yield from _read_namespaces()
    ana = (yield from read_ana(controller, min_page_bytes)) if controller.reports_ana else None
    return Inventory(MappingProxyType(namespaces), ana)


def read_ana(controller: ControllerInfo, min_page_bytes: int) -> Procedure[AnaLog]:
    """In one piece if it fits, as Linux' target cannot do otherwise (it ignores the offset)."""
    total_bytes = max_ana_log_bytes(controller.nanagrpid, min(controller.mnan or controller.nn, MAX_NAMESPACES))
    limit_bytes = min(SCRATCH_BYTES, min_page_bytes << controller.mdts if controller.mdts else SCRATCH_BYTES)
    data = b""
    while len(data) < total_bytes:
        piece_bytes = min(total_bytes - len(data), limit_bytes)
        build = partial(
            get_log_page,
            LogPage.ASYMMETRIC_NAMESPACE_ACCESS,
            offset_bytes=len(data),
            retain_event=len(data) + piece_bytes < total_bytes,
        )
        data += (yield Ask(build, piece_bytes)).data
    return parse_ana_log(data)


def read_error_log() -> Procedure[bytes]:
    """The newest entry; reading it lets the next error be announced."""
    return (yield Ask(partial(get_log_page, LogPage.ERROR_INFORMATION), 64)).data


def _read_namespaces() -> Procedure[dict[int, Namespace]]:
    nsids: list[int] = []
    while True:
        build = partial(identify_active_namespaces, after_nsid=nsids[-1] if nsids else 0)
        more = parse_namespace_list((yield Ask(build, IDENTIFY_BYTES)).data)
        nsids += more
        if len(nsids) > MAX_NAMESPACES:
            raise UnsupportedError(
                f"the subsystem has more than {MAX_NAMESPACES} namespaces",
                next_step="Export fewer namespaces in one subsystem.",
            )
        if len(more) < NAMESPACE_LIST_ENTRIES:
            break
    namespaces = {}
    for nsid in nsids:
        info = None
        with suppress(NvmeCommandError):
            info = parse_namespace((yield Ask(partial(identify_namespace, nsid), IDENTIFY_BYTES)).data)
        if info is not None:  # else it went away just now
            ids = yield from _read_ids(nsid)
            namespaces[nsid] = Namespace(nsid, info, ids, _problem(info, ids))
    return namespaces


def _read_ids(nsid: int) -> Procedure[NamespaceIds]:
    try:
        answer = yield Ask(partial(identify_namespace_descriptors, nsid), IDENTIFY_BYTES)
    except NvmeCommandError:
        return NamespaceIds()  # a controller of before 1.3
    return parse_namespace_descriptors(answer.data)


def _problem(info: NamespaceInfo, ids: NamespaceIds) -> str | None:
    if ids.csi not in (None, 0):
        return f"it belongs to command set {ids.csi}, not to the NVM command set"
    if info.metadata_is_interleaved:
        return "metadata lies between its blocks"
    if info.has_protection_information:
        return "it has protection information"
    return None
