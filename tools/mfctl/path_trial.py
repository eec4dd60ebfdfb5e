"""``mfctl path test``: what each path to an exported pool does when it is alone. Reads only."""

from __future__ import annotations

import contextlib
import math
import queue
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.api.types import Access, Attachment, ChunkService, Namespace
from meshfusion.host.path.drive_proof import check_pool
from meshfusion.host.path.flexpath.addresses import PathAddress, path_specs
from meshfusion.host.path.flexpath.link import PathInitiator, PathSpec
from meshfusion.host.path.namespace_view import APPEAR_S, read_blocks
from meshfusion.host.path.rdma_ports import local_ports, paths_to
from meshfusion.host.pool_standing import PoolStanding
from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.nvme.auth_keys import parse_secret
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.pending import PendingTransfer
from meshfusion.tools.mfctl.service_access import access_to

CONNECT_S: Final = 5.0
READ_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 2.0
LEAVE_S: Final = 2.0
ENGINE_VERSION: Final = "mfctl path test"  # what `mfctl pool status` shows of this holder
NOBODY: Final = bytes(32)  # an identity that no engine has: it matches nothing


@dataclass(frozen=True, slots=True)
class ReadLoad:
    """``depth`` reads of ``size_bytes`` at a time, anywhere in the pool, for ``seconds``."""

    seconds: float
    size_bytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one path. ``error`` is empty when it works; ``median_s`` and ``p99_s`` are of single reads."""

    local_port: str
    portal: str
    error: str = ""
    next_step: str = ""
    read_bytes: int = 0
    bytes_per_s: float = 0.0
    median_s: float = 0.0
    p99_s: float = 0.0


class Way(NamedTuple):
    """A path, and what opens it."""

    address: PathAddress
    spec: PathSpec


def try_paths(service_address: str, load: ReadLoad, *, tenant: str = DEFAULT_TENANT) -> list[Outcome]:
    """Attach, try one path after the other, detach whatever happened.

    Raises :class:`~meshfusion.jbof.errors.MeshFusionError`: there is no way to begin. What is wrong with a path is in
    its outcome.
    """
    client = GrpcChunkService(service_address, access_to(service_address))
    try:
        with attached(client, tenant) as attachment:
            _check_load(load, attachment.namespaces)
            # One for all paths, and longer than any of them: a queue pair that does not end may still write there.
            buffer = AlignedBuffer(load.size_bytes * load.depth)
            return [_try_path(way, attachment, load, buffer) for way in ways_to(attachment)]
    finally:
        client.close()


@contextlib.contextmanager
def attached(service: ChunkService, tenant: str = DEFAULT_TENANT) -> Iterator[Attachment]:
    """As a holder of its own, kept by heartbeats."""
    standing = PoolStanding(
        service,
        identity=NOBODY,
        engine_version=ENGINE_VERSION,
        rank_count=1,
        access=Access.NVMEOF,
        tenant=tenant,
        tell=lambda event: None,
    )
    try:
        yield standing.start()
    finally:
        standing.leave(patience_s=LEAVE_S)


def ways_to(attachment: Attachment) -> list[Way]:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError`: none is over RDMA."""
    export = attachment.export
    assert export is not None, "attached for NVMe-oF"
    addresses = paths_to(export.portals, local_ports())
    host_id = uuid.uuid5(uuid.NAMESPACE_URL, export.host_nqn)
    host_key = parse_secret(export.host_key) if export.host_key else None
    # What is under way ends with the connection, so that this bounds only how long it is tried to connect.
    specs = path_specs(
        addresses,
        export.subsystem_nqn,
        export.host_nqn,
        host_id,
        timeout_s=CONNECT_S,
        loss_timeout_s=CONNECT_S,
        host_key=host_key,
    )
    return [Way(address, spec) for address, spec in zip(addresses, specs, strict=True)]


def _check_load(load: ReadLoad, namespaces: Sequence[Namespace]) -> None:
    for namespace in namespaces:
        _check_reads(load.size_bytes, namespace)


def _check_reads(size_bytes: int, namespace: Namespace) -> None:
    data_bytes = namespace.lba_count * namespace.lba_bytes
    if size_bytes % namespace.lba_bytes or size_bytes > data_bytes:
        raise ConfigError(
            f"reads of {size_bytes} bytes cannot be made: a drive has {data_bytes} bytes in blocks of "
            f"{namespace.lba_bytes}",
            next_step=f"Give --size as a multiple of {namespace.lba_bytes} bytes, at most a drive's size.",
        )


def _try_path(way: Way, attachment: Attachment, load: ReadLoad, buffer: AlignedBuffer) -> Outcome:
    address = way.address
    local = address.net_device if address.source_address is None else f"{address.net_device} {address.source_address}"
    portal = f"rdma://{address.portal}:{address.service}"
    try:
        initiator = way.spec.open(lambda event: None)
        try:
            reader = _Reader(initiator, attachment.namespaces, load, buffer)
            for namespace in attachment.namespaces:
                check_pool(partial(reader.block, namespace.nsid), attachment.pool_uuid, namespace.nsid, portal)
            seconds, latencies_s = reader.run()
        finally:
            initiator.close(timeout_s=CLOSE_S)
    except MeshFusionError as error:
        return Outcome(local, portal, error.message, error.next_step)
    read_bytes = len(latencies_s) * load.size_bytes
    return Outcome(
        local,
        portal,
        read_bytes=read_bytes,
        bytes_per_s=read_bytes / seconds,
        median_s=percentile(latencies_s, 0.5),
        p99_s=percentile(latencies_s, 0.99),
    )


def percentile(values: Sequence[float], part: float) -> float:
    """The least of ``values`` that ``part`` of them do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


class _Drive(NamedTuple):
    """``factor``: the namespace's blocks in one of the pool's; ``places``: where a read may begin, ``read_lbas`` of its
    blocks apart."""

    factor: int
    places: int
    read_lbas: int


class _Reader:
    """Of one path, from all drives alike. Raises :class:`~meshfusion.jbof.errors.MeshFusionError` when it does not show
    one of them."""

    def __init__(
        self, initiator: PathInitiator, namespaces: Sequence[Namespace], load: ReadLoad, buffer: AlignedBuffer
    ) -> None:
        self._initiator = initiator
        self._load = load
        self._buffer = buffer
        self._drives = {namespace.nsid: _drive(initiator, namespace, load.size_bytes) for namespace in namespaces}
        self._rng = random.Random(0)

    def block(self, nsid: int, lba: int) -> bytes:
        """``lba``: in the pool's blocks."""
        return read_blocks(self._initiator, nsid, lba * self._drives[nsid].factor, LBA_BYTES)

    def run(self) -> tuple[float, list[float]]:
        """How many seconds it took, and each read. Raises what the first read raises that fails."""
        array = self._buffer.array
        region = self._initiator.register_address(array.ctypes.data, array.nbytes, writable=True, owner=array)
        ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        latencies_s: list[float] = []
        began_s = now_s = time.monotonic()
        end_s = began_s + self._load.seconds
        for slot in range(self._load.depth):
            self._begin(region, slot, ended.put)
        under_way = self._load.depth
        while under_way:
            try:
                read = ended.get(timeout=2 * READ_TIMEOUT_S)
            except queue.Empty:
                raise MediaError(
                    "reads neither come back nor fail", next_step="Report this as a bug, with the log."
                ) from None
            under_way -= 1
            read.pending.wait()
            latencies_s.append(read.seconds)
            now_s = time.monotonic()
            if now_s < end_s:
                self._begin(region, read.slot, ended.put)
                under_way += 1
        region.close()
        return now_s - began_s, latencies_s

    def _begin(self, region: RegisteredRegion, slot: int, when_ended: Callable[[_Ended], None]) -> None:
        part = region.part(slot * self._load.size_bytes, self._load.size_bytes)
        nsid = self._rng.choice(list(self._drives))
        drive = self._drives[nsid]
        lba = self._rng.randrange(drive.places) * drive.read_lbas
        began_s = time.monotonic()
        pending = self._initiator.begin_read(nsid, lba, [part], timeout_s=READ_TIMEOUT_S)
        pending.when_ended(partial(_tell, when_ended, slot, pending, began_s))


class _Ended(NamedTuple):
    slot: int
    pending: PendingTransfer
    seconds: float


def _tell(when_ended: Callable[[_Ended], None], slot: int, pending: PendingTransfer, began_s: float) -> None:
    """On the initiator's thread, so that it is the path that is timed, and not whoever looks at it."""
    when_ended(_Ended(slot, pending, time.monotonic() - began_s))


def _drive(initiator: PathInitiator, namespace: Namespace, size_bytes: int) -> _Drive:
    factor = namespace.lba_bytes // _lba_bytes(initiator, namespace)
    places = namespace.lba_count * namespace.lba_bytes // size_bytes
    return _Drive(factor, places, size_bytes // namespace.lba_bytes * factor)


def _lba_bytes(initiator: PathInitiator, namespace: Namespace) -> int:
    """Of the namespace's blocks on this path, of which the pool's are multiples."""
    end_s = time.monotonic() + APPEAR_S
    while (found := initiator.inventory.namespaces.get(namespace.nsid)) is None:
        if time.monotonic() > end_s:
            raise MediaError(
                f"the target does not show namespace {namespace.nsid}",
                next_step="See the service's log and `mfctl pool status --service`.",
            )
        time.sleep(0.005)
    lba_bytes = found.info.lba_bytes
    if found.problem is not None or lba_bytes > namespace.lba_bytes or namespace.lba_bytes % lba_bytes:
        raise UnsupportedError(
            f"namespace {namespace.nsid} cannot be used: {found.problem or f'it has blocks of {lba_bytes} bytes'}",
            next_step=f"Format the drive with blocks of at most {namespace.lba_bytes} bytes, without protection.",
        )
    return lba_bytes
