"""A writer that keeps to the rules: it takes the space that another one left, and reads everything that is offered."""

from __future__ import annotations

import operator
import os
import threading
import time
import uuid
from dataclasses import replace

import numpy as np

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.path.cpus import engine_cpus
from meshfusion.host.path.load_job import UnitRead
from meshfusion.host.path.opening import PathOpener
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.shards import ShardWrite, WriteFate
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.errors import MeshFusionError, ServiceUnavailableError
from meshfusion.jbof.format import ChunkHeader
from meshfusion.jbof.pool_addresses import pool_lba
from tests.host.support.kv_memory import layer_outermost
from tests.lab.guest_path import save, wait
from tests.lab.silent_writer import DEADLINE_S, HEARTBEAT_S, SIZE

IDENTITY = b"O" * 32
UNITS = SIZE.unit_count
TOKENS = 16 * UNITS
START_S = 60.0
KERNELS = load_kernels(SIZE.unit_bytes)


def unit_content(chunk: int, unit: int) -> bytes:
    return np.random.default_rng([chunk, unit]).integers(0, 256, SIZE.unit_bytes, dtype=np.uint8).tobytes()


def key_of(chunk: int) -> bytes:
    return chunk.to_bytes(32, "big")


def chunk_of(key: bytes) -> int:
    return int.from_bytes(key, "big")


class OtherWriter:
    """Attached, and heard of, until it is closed. ``portal``: the one that it goes through."""

    def __init__(self, address: str, portal: str) -> None:
        self._service = GrpcChunkService(address)
        attachment = self._attach()
        assert attachment.export is not None
        self.subsystem_nqn = attachment.export.subsystem_nqn
        self.host_nqn = attachment.export.host_nqn
        self.attachment = attachment
        self._is_closed = threading.Event()
        threading.Thread(target=self._heartbeats, daemon=True).start()
        self._kv = layer_outermost(blocks=2 * UNITS, layers=1, page_bytes=SIZE.unit_bytes)
        opener = PathOpener(
            memory=HostKvMemory(self._kv.memory, KERNELS),
            layouts=(self._kv.layout,),
            units_per_shard=(UNITS,),
            load_threads=1,
            direct_io=True,
            cpus=engine_cpus(),
            is_digest_right=operator.eq,
        )
        portals = tuple(each for each in attachment.export.portals if each.address == portal)
        one_way = replace(attachment, export=replace(attachment.export, portals=portals))
        self._path = opener.open(PathKind.RDMA, one_way)

    def close(self) -> None:
        self._is_closed.set()
        self._path.close()
        try:
            self._detach()
        finally:
            self._service.close()

    def _detach(self) -> None:
        """The service may have just been started again: its client tries to connect now and then only."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._service.detach(api.DetachRequest(self.attachment.holder_id), deadline_s=DEADLINE_S)
                return
            except ServiceUnavailableError:
                if time.monotonic() > end_s:
                    raise
            time.sleep(0.1)

    def store(self, chunk: int) -> str:
        """``stored``, or why not."""
        item = api.ReserveItem(key_of(chunk), 0, 0, TOKENS, (SIZE,))
        holder_id, epoch = self.attachment.holder_id, self.attachment.epoch
        request = api.ReserveRequest(holder_id, epoch, (item,))
        (result,) = self._service.reserve(request, deadline_s=DEADLINE_S).results
        if result.outcome is not api.ReserveOutcome.GRANTED:
            return str(result.outcome.value)
        (extent,) = result.extents
        for unit in range(UNITS):
            self._kv.memory[self._kv.byte_places[unit]] = np.frombuffer(unit_content(chunk, unit), np.uint8)
        written = save(self._path, ShardWrite((0, chunk), extent, self._header(chunk, extent), tuple(range(UNITS))))
        if written.unit_digests is None:
            grant_ids = (result.grant_id,)
            doubtful = grant_ids if written.fate is WriteFate.UNKNOWN else ()
            given_back = () if doubtful else grant_ids
            self._service.abort(api.AbortRequest(holder_id, epoch, given_back, doubtful), deadline_s=DEADLINE_S)
            return written.reason
        commit = api.CommitItem(result.grant_id, (written.unit_digests,))
        reply = self._service.commit(api.CommitRequest(holder_id, epoch, (commit,)), deadline_s=DEADLINE_S)
        return "stored" if reply.committed == (True,) else "not committed"

    def chunks(self) -> list[api.ChunkRecord]:
        """All that the pool offers."""
        found: list[api.ChunkRecord] = []
        after = b""
        while True:
            reply = self._service.list_chunks(api.ListRequest(after, 500), deadline_s=DEADLINE_S)
            found += reply.chunks
            after = reply.next_after_key
            if not after:
                return found

    def load(self, chunk: api.ChunkRecord) -> str:
        """Over the path, proven, and compared with what the chunk's number says: ``right``, or what it was."""
        (shard,) = chunk.shards
        first = pool_lba(shard.extent.namespace, shard.extent.lba + shard.payload_lba_offset)
        reads = [
            UnitRead(first + i * shard.unit_lba_count, shard.unit_bytes, UNITS + i, digest)
            for i, digest in enumerate(shard.unit_digests)
        ]
        self._kv.memory[:] = 0
        result = wait(self._path.load(reads, abandon_after_s=DEADLINE_S))
        if result.failures:
            return "mismatch" if any(failure.is_mismatch for failure in result.failures) else result.failures[0].reason
        got = [self._kv.unit(UNITS + i) for i in range(UNITS)]
        return "right" if got == [unit_content(chunk_of(chunk.key), i) for i in range(UNITS)] else "WRONG BYTES"

    def _attach(self) -> api.Attachment:
        """The target may be starting."""
        end_s = time.monotonic() + START_S
        while True:
            request = api.AttachRequest(
                uuid.uuid4().hex, "vllm", "1", "guest", os.getpid(), IDENTITY, 1, access=api.Access.NVMEOF
            )
            try:
                return self._service.attach(request, deadline_s=DEADLINE_S)
            except ServiceUnavailableError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.5)

    def _header(self, chunk: int, extent: api.Extent) -> ChunkHeader:
        return ChunkHeader(
            pool_uuid=uuid.UUID(self.attachment.pool_uuid).bytes,
            identity=IDENTITY,
            key=key_of(chunk),
            tenant="default",
            group=0,
            rank=0,
            shard_count=1,
            position_tokens=0,
            token_count=TOKENS,
            segment=extent.segment,
            generation=extent.generation,
            lba=extent.lba,
            unit_bytes=SIZE.unit_bytes,
            unit_digests=(),
        )

    def _heartbeats(self) -> None:
        request = api.HeartbeatRequest(self.attachment.holder_id, self.attachment.epoch, ())
        while not self._is_closed.wait(HEARTBEAT_S):
            try:
                self._service.heartbeat(request, deadline_s=DEADLINE_S)
            except MeshFusionError:  # the service is being restarted; whoever does that makes another one of these
                continue
