"""From an attachment to an open path: the one place that knows all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.types import Access, Attachment
from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.memory.kv_memory import KvMemory
from meshfusion.host.path.block import block_path
from meshfusion.host.path.cpus import Cpus
from meshfusion.host.path.data_path import DataPath
from meshfusion.host.path.drive_proof import check_pool
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.pool_data import PoolData
from meshfusion.host.path.probe import (
    DEVICE_MEMORY_PREFERENCE,
    HOST_MEMORY_PREFERENCE,
    KvTarget,
    choose,
    look_for_rdma,
    report_paths,
)
from meshfusion.host.path.proof import IsDigestRight
from meshfusion.host.path.staged import staged_path_to
from meshfusion.jbof.errors import FormatError, MediaError, MeshFusionError
from meshfusion.jbof.format import LBA_BYTES, shard_lba_count
from meshfusion.jbof.media.file import DataFile, DirectMode, open_data_file
from meshfusion.jbof.nvme.key_scope import KeyScope

logger = logging.getLogger("meshfusion.path")

READ_BYTES = 6 << 20  # of one load thread; a larger unit gets what it needs


@dataclass(frozen=True, slots=True, eq=False)
class PathOpener:
    """What every path of one worker needs. ``memory`` outlives the paths. ``layouts`` and ``units_per_shard``: of each
    KV group, of its largest chunk.
    ``key_scope``: of a path over RDMA."""

    memory: KvMemory
    layouts: tuple[GroupLayout, ...]
    units_per_shard: tuple[int, ...]
    load_threads: int
    direct_io: bool
    cpus: Cpus
    is_digest_right: IsDigestRight
    key_scope: KeyScope = KeyScope.REGION

    def open(self, wanted: PathKind | None, attachment: Attachment) -> DataPath:
        """``wanted`` None: the best that is possible here. May take as long as a target needs to be connected to.

        Raises :class:`~meshfusion.jbof.errors.MeshFusionError`: the data is out of reach, or is another pool's, or not
        to be had in the way that is wanted.
        """
        if attachment.export is not None:
            assert wanted in (None, PathKind.RDMA), f"attached for {wanted}"
            return self._open_rdma(attachment)
        os.close(hold_liveness(Path(attachment.liveness_path)))  # only to see that it is in reach
        return self._open_local(wanted, attachment)

    def _open_local(self, wanted: PathKind | None, attachment: Attachment) -> DataPath:
        data = open_drives(attachment, DirectMode.AUTO if self.direct_io else DirectMode.OFF)
        try:
            kind = self._choose(wanted, data)
        except BaseException:
            data.close()
            raise
        lba_bytes = attachment.namespaces[0].lba_bytes
        if kind is PathKind.BLOCK:
            assert isinstance(self.memory, HostKvMemory), self.memory.place
            return block_path(
                data,
                self.memory.array,
                self.layouts,
                self.memory.kernels,
                lba_bytes=lba_bytes,
                load_threads=self.load_threads,
                max_units=max(self.units_per_shard),
                cpus=self.cpus,
                is_digest_right=self.is_digest_right,
            )
        return staged_path_to(
            self.memory,
            data,
            self.layouts,
            lba_bytes=lba_bytes,
            load_threads=self.load_threads,
            read_bytes=READ_BYTES,
            write_bytes=self._shard_lbas_max(lba_bytes) * lba_bytes,
            cpus=self.cpus,
            is_digest_right=self.is_digest_right,
        )

    def _choose(self, wanted: PathKind | None, data: PoolData) -> PathKind:
        """What every drive can do: a path serves them all."""
        place = self.memory.place
        # Without an export there is nothing that RDMA could reach.
        preference: list[PathKind] = [
            kind
            for kind in (DEVICE_MEMORY_PREFERENCE if place.device else HOST_MEMORY_PREFERENCE)
            if kind is not PathKind.RDMA
        ]
        rdma = look_for_rdma()
        reports = [report_paths(file, KvTarget(place, self.layouts), rdma) for file in data.files.values()]
        kinds = [choose(report, wanted, preference) for report in reports]
        kind = wanted or max(kinds, key=lambda kind: preference.index(kind))
        for report in reports:
            logger.info("path %s", report.answer(kind))
        return kind

    def _shard_lbas_max(self, lba_bytes: int) -> int:
        return max(
            shard_lba_count(layout.unit_bytes, units, lba_bytes)
            for layout, units in zip(self.layouts, self.units_per_shard, strict=True)
        )

    def _open_rdma(self, attachment: Attachment) -> DataPath:
        from meshfusion.host.path.exported_drives import open_exported
        from meshfusion.host.path.flexpath.addresses import path_specs
        from meshfusion.host.path.flexpath.board import show_paths
        from meshfusion.host.path.flexpath.link import CurrentKey
        from meshfusion.host.path.flexpath.locality import shown_gpu
        from meshfusion.host.path.flexpath.multipath import Multipath
        from meshfusion.host.path.rdma import rdma_path
        from meshfusion.host.path.rdma_ports import local_ports, paths_to
        from meshfusion.jbof.nvme.auth_keys import parse_secret

        export = attachment.export
        assert export is not None
        addresses = paths_to(export.portals, local_ports())
        host_id = uuid.uuid5(uuid.NAMESPACE_URL, export.host_nqn)
        key = CurrentKey(parse_secret(export.host_key) if export.host_key else None)
        specs = path_specs(
            addresses,
            export.subsystem_nqn,
            export.host_nqn,
            host_id,
            gpu_pci_address=shown_gpu(self.memory.place.pci_address),
            key=key,
            key_scope=self.key_scope,
        )
        multipath = Multipath(specs, key=key)
        try:
            view, drives = open_exported(multipath, attachment)
        except BaseException:
            multipath.close(timeout_s=0.0)
            raise
        show_paths(multipath, attachment.pool_uuid)
        logger.info(
            "connected to %s over %s, with keys for each %s",
            export.subsystem_nqn,
            ", ".join(path.name for path in addresses),
            self.key_scope.value,
        )
        path = rdma_path(
            view,
            drives,
            self.memory,
            self.layouts,
            lba_bytes=attachment.namespaces[0].lba_bytes,
            load_threads=self.load_threads,
            read_bytes=READ_BYTES,
            max_units=max(self.units_per_shard),
            cpus=self.cpus,
            is_digest_right=self.is_digest_right,
            take_key=lambda text: multipath.use_key(parse_secret(text)),
        )
        path.exported = drives
        return path


def access_of(wanted: PathKind | None) -> Access:
    """What to ask the service for."""
    return Access.NVMEOF if wanted is PathKind.RDMA else Access.LOCAL


def open_drives(attachment: Attachment, direct: DirectMode) -> PoolData:
    """The drives that the service names. One of several that does not open is left out, and that is told: what it holds
    is computed. Raises FormatError or MediaError when none does."""
    files: dict[int, DataFile] = {}
    errors: list[MeshFusionError] = []
    for namespace in attachment.namespaces:
        path = Path(namespace.path)
        try:
            check_pool_file(path, attachment.pool_uuid, namespace.nsid)
            files[namespace.nsid] = open_data_file(path, writable=True, direct=direct)
        except (FormatError, MediaError) as error:
            logger.error("the pool's drive %d does not open: %s", namespace.nsid - 1, error)
            errors.append(error)
    if not files:
        raise errors[0]
    return PoolData(files)


def check_pool_file(path: Path, pool_uuid: str, nsid: int) -> None:
    """Is the file at ``path`` that drive of the pool that the service spoke of? Raises FormatError or MediaError."""
    with contextlib.closing(open_data_file(path, writable=False, direct=DirectMode.OFF)) as data:

        def read(lba: int) -> bytes:
            raw = bytearray(LBA_BYTES)
            data.read_into(lba, memoryview(raw))
            return bytes(raw)

        check_pool(read, pool_uuid, nsid, str(path))
