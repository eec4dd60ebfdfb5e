"""A drive read from its own pages, whoever carries the admin commands: Linux, SPDK or a test."""

from __future__ import annotations

from typing import Final, Protocol

from meshfusion.jbof.drives.capabilities import (
    CTRATT_ENDURANCE_GROUPS,
    CTRATT_FLEXIBLE_DATA_PLACEMENT,
    capabilities,
    endurance_group,
)
from meshfusion.jbof.drives.health import (
    LOG_BYTES,
    EnduranceGroup,
    Health,
    parse_endurance_group,
    parse_health,
)
from meshfusion.jbof.drives.identity import nvme_identity
from meshfusion.jbof.drives.placement import (
    FDP_STATISTICS_BYTES,
    Fdp,
    FdpStatistics,
    fdp_configs_bytes,
    fdp_from_feature,
    parse_fdp_configs,
    parse_fdp_statistics,
    parse_zones,
)
from meshfusion.jbof.drives.reading import DriveReading
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.admin_commands import Cns
from meshfusion.jbof.nvme.identify import ControllerInfo, NvmLimits, parse_controller, parse_nvm_limits
from meshfusion.jbof.nvme.namespaces import (
    NamespaceIds,
    NamespaceInfo,
    parse_namespace,
    parse_namespace_descriptors,
)

CSI_NVM: Final = 0
CSI_ZONED: Final = 2
CNS_COMMAND_SET_NAMESPACE: Final = 0x05

LOG_HEALTH: Final = 0x02
LOG_ENDURANCE_GROUP: Final = 0x09
LOG_FDP_CONFIGS: Final = 0x20
LOG_FDP_STATISTICS: Final = 0x22
FEATURE_FDP: Final = 0x1D

_NSID_ALL: Final = 0xFFFFFFFF


class PageReader(Protocol):
    """Admin commands to one controller. All raise :class:`~meshfusion.jbof.errors.MediaError` when refused."""

    def identify(self, cns: int, *, nsid: int = 0, csi: int = CSI_NVM) -> bytes:
        """4096 bytes (Base Figure 311)."""

    def log_page(self, page: int, length_bytes: int, *, nsid: int = _NSID_ALL, group: int = 0) -> bytes:
        """``group``: the endurance group, the log specific identifier of those pages that are of one."""

    def feature(self, feature: int, *, group: int = 0) -> int:
        """The current value: dword 0 of the completion. ``group`` as above, in dword 11."""


def read_drive(pages: PageReader, nsid: int) -> DriveReading:
    """Raises :class:`~meshfusion.jbof.errors.MediaError` when it does not answer or answers what cannot be, and
    :class:`~meshfusion.jbof.errors.UnsupportedError` when it cannot be told from others.

    What a drive need not have is asked for only where it says that it has it; a page of numbers that it then refuses
    is left out, for a drive is better used without a gauge than not at all.
    """
    controller = parse_controller(pages.identify(Cns.CONTROLLER))
    namespace_page = pages.identify(Cns.NAMESPACE, nsid=nsid)
    namespace = parse_namespace(namespace_page)
    if namespace is None:
        raise MediaError(f"namespace {nsid} is not there any more", next_step="Look again: `mfctl jbof list`.")
    ids = _ids(pages, nsid)
    group = endurance_group(namespace_page) if controller.ctratt & CTRATT_ENDURANCE_GROUPS else 0
    fdp = _fdp(pages, controller, group)
    zones = None
    if ids.csi == CSI_ZONED:
        zones = parse_zones(
            pages.identify(CNS_COMMAND_SET_NAMESPACE, nsid=nsid, csi=CSI_ZONED), _format_index(namespace)
        )
    health, note = _health(pages)
    return DriveReading(
        identity=nvme_identity(controller.mn, controller.sn, nsid, namespace, ids),
        capabilities=capabilities(
            controller, namespace, namespace_page, limits=_limits(pages, controller), fdp=fdp, zones=zones
        ),
        firmware=controller.fr,
        health=health,
        health_note=note,
        endurance=_endurance(pages, group),
        fdp_statistics=_fdp_statistics(pages, group) if fdp is not None and fdp.enabled else None,
    )


def _ids(pages: PageReader, nsid: int) -> NamespaceIds:
    """Drives of before NVMe 1.3 have no descriptors."""
    try:
        return parse_namespace_descriptors(pages.identify(Cns.NAMESPACE_DESCRIPTORS, nsid=nsid))
    except MediaError:
        return NamespaceIds()


def _limits(pages: PageReader, controller: ControllerInfo) -> NvmLimits | None:
    if not controller.has_dataset_management:
        return None
    try:
        return parse_nvm_limits(pages.identify(Cns.COMMAND_SET_CONTROLLER))
    except MediaError:
        return None


def _health(pages: PageReader) -> tuple[Health | None, str]:
    """Zeros are what targets answer that know nothing (SPDK's and Linux'); a drive has a temperature at least."""
    try:
        page = pages.log_page(LOG_HEALTH, LOG_BYTES)
        return (parse_health(page), "") if any(page) else (None, "unknown: it reports zeros only")
    except MediaError as error:
        return None, error.message


def _endurance(pages: PageReader, group: int) -> EnduranceGroup | None:
    if not group:
        return None
    try:
        return parse_endurance_group(pages.log_page(LOG_ENDURANCE_GROUP, LOG_BYTES, nsid=0, group=group))
    except MediaError:
        return None


def _fdp(pages: PageReader, controller: ControllerInfo, group: int) -> Fdp | None:
    if not controller.ctratt & CTRATT_FLEXIBLE_DATA_PLACEMENT or not group:
        return None
    header = pages.log_page(LOG_FDP_CONFIGS, 16, nsid=0, group=group)
    length_bytes = -(-fdp_configs_bytes(header) // 4) * 4
    configs = parse_fdp_configs(pages.log_page(LOG_FDP_CONFIGS, length_bytes, nsid=0, group=group))
    return fdp_from_feature(configs, pages.feature(FEATURE_FDP, group=group))


def _fdp_statistics(pages: PageReader, group: int) -> FdpStatistics | None:
    try:
        return parse_fdp_statistics(pages.log_page(LOG_FDP_STATISTICS, FDP_STATISTICS_BYTES, nsid=0, group=group))
    except MediaError:
        return None


def _format_index(namespace: NamespaceInfo) -> int:
    """Of the LBA format in use (see :func:`meshfusion.jbof.nvme.namespaces.parse_namespace`)."""
    wide = len(namespace.lba_formats) > 16
    return namespace.flbas & 0xF | ((namespace.flbas >> 5 & 0x3) << 4 if wide else 0)
