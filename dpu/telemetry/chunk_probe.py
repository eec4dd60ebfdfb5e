"""Does the pool do what engines need of it? A chunk is written, found, read and proven, the way an engine does it.

The probe is an engine of its own, of a kind of its own, with an identity that no model has. It writes two blocks now
and then, and reads them in between: what it costs the medium is nothing, and of what the pool learns it is one KV
group. Its chunks are never given back: they go when their segment does, which they are no reason to keep.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.tenant import CHUNK_TENANT, DEFAULT_TENANT
from meshfusion.dpu.store.checks import PROBE_KIND
from meshfusion.dpu.telemetry.probe_result import ProbeResult, ProbeState
from meshfusion.jbof.errors import MeshFusionError, StaleHolderError
from meshfusion.jbof.format import (
    LBA_BYTES,
    ChunkHeader,
    decode_chunk_header,
    encode_chunk_header,
    header_lba_count,
    shard_lba_count,
)
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DataFile, open_data_file
from meshfusion.jbof.unit_digests import UnitDigests

IDENTITY: Final = hashlib.sha256(b"meshfusion: the service's own probe").digest()
UNIT_BYTES: Final = LBA_BYTES
TOKENS: Final = 16
_SIZE: Final = api.ShardSize(0, UNIT_BYTES, 1)


class ProbeFailedError(MeshFusionError):
    """The pool did something that it must not."""


@dataclass(frozen=True, slots=True)
class _Written:
    key: bytes
    digest: bytes
    written_s: float


@dataclass(slots=True)
class _Told:
    """Of one probe, as it goes."""

    reasons: list[str] = field(default_factory=list)
    read_s: float | None = None  # when what was read had been written


class ChunkProbe:
    """Used by one thread. ``tenant``: one of the pool's, as which it attaches. ``write_interval_s``: it writes no more
    often, but for a chunk that is gone or the end of saves' being stopped. ``random_bytes`` makes what it writes,
    ``clock`` reads monotonic seconds."""

    def __init__(
        self,
        service: api.ChunkService,
        *,
        clock: Callable[[], float],
        write_interval_s: float,
        tenant: str = DEFAULT_TENANT,
        call_deadline_s: float = 5.0,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._service = service
        self._clock = clock
        self._write_interval_s = write_interval_s
        self._tenant = tenant
        self._deadline_s = call_deadline_s
        self._random_bytes = random_bytes
        self._digests = UnitDigests()
        self._incarnation = ""
        self._attachment: api.Attachment | None = None
        self._liveness = -1
        self._written: _Written | None = None
        self._writes_worked = True
        self._lookups = 0
        self.step = ""  # what it is at, for whoever waits for it

    @property
    def heartbeat_s(self) -> float | None:
        """How often :meth:`beat` is wanted; None while it is not attached."""
        return None if self._attachment is None else self._attachment.heartbeat_s

    def prepare(self) -> None:
        """On a new machine the digest is compiled first, for seconds."""
        self._digests.digest_of(bytes(UNIT_BYTES))

    def run(self) -> ProbeResult:
        """Never raises what the pool or the medium raise: that is the answer."""
        begun_s = self._clock()
        told = _Told()
        try:
            try:
                self._run(told)
            except StaleHolderError:  # it was cut off, or the pool has another epoch: as any engine, it comes anew
                self._forget()
                self._run(told)
            state = ProbeState.DEGRADED if told.reasons else ProbeState.OK
        except MeshFusionError as error:
            told.reasons.append(f"{self.step}: {error.message}")
            state = ProbeState.FAILING
        now_s = self._clock()
        age_s = None if told.read_s is None else now_s - told.read_s
        return ProbeResult(state, tuple(told.reasons), now_s - begun_s, age_s)

    def beat(self) -> None:
        """It is there. What goes wrong with that, the next probe tells."""
        if (attachment := self._attachment) is None:
            return
        try:
            request = api.HeartbeatRequest(attachment.holder_id, attachment.epoch, ())
            self._service.heartbeat(request, deadline_s=self._deadline_s)
        except MeshFusionError:
            self._forget()

    def close(self) -> None:
        """Leave. Nothing is being written."""
        if (attachment := self._attachment) is None:
            return
        self._forget()
        with contextlib.suppress(MeshFusionError):  # its lock is free: the pool finds out by itself
            self._service.detach(api.DetachRequest(attachment.holder_id), deadline_s=self._deadline_s)

    # ---- one probe -----------------------------------------------------------------------------------------------

    def _run(self, told: _Told) -> None:
        self._attach()
        self.step = "asking for the pool's status"
        stopped = self._service.status(deadline_s=self._deadline_s).saves_stopped_reason
        if stopped:
            told.reasons.append(f"saves are stopped: {stopped}")
            self._writes_worked = False
        is_new = not stopped and self._is_write_due() and self._try_write(told)
        if self._find(told, is_new=is_new):
            return
        if not told.reasons and self._find(told, is_new=self._try_write(told)):
            return  # the segment of the former chunk was given up, as it may be
        told.reasons.append("no chunk of the probe is there to be read: whether hits work is not known")

    def _try_write(self, told: _Told) -> bool:
        """Is a new chunk there? Why not is told; hits may go on all the same."""
        try:
            return self._write(self._attachment or self._attach(), told)
        except StaleHolderError:
            raise
        except MeshFusionError as error:
            self._writes_worked = False
            told.reasons.append(f"{self.step}: {error.message}")
            return False

    def _find(self, told: _Told, *, is_new: bool) -> bool:
        """Is what was written last there, and what was written? ``is_new``: it was written just now."""
        written = self._written
        if written is not None and self._read(self._attachment or self._attach(), written):
            told.read_s = written.written_s
            return True
        if is_new:
            raise _failed("a chunk that was just committed is not found")
        self._written = None
        return False

    def _attach(self) -> api.Attachment:
        """Each time anew, as the same incarnation: drives may be reached elsewhere by now."""
        self.step = "attaching"
        if self._attachment is None:
            self._incarnation = f"probe-{uuid.uuid4().hex}"
        request = api.AttachRequest(
            incarnation=self._incarnation,
            engine_kind=PROBE_KIND,
            engine_version="of the service itself",
            host="localhost",
            pid=os.getpid(),
            identity=IDENTITY,
            rank_count=1,
            tenant=self._tenant,
        )
        attachment = self._service.attach(request, deadline_s=self._deadline_s)
        if self._liveness < 0:
            self._liveness = hold_liveness(Path(attachment.liveness_path))
        self._attachment = attachment
        return attachment

    def _is_write_due(self) -> bool:
        if self._written is None or not self._writes_worked:
            return True
        return self._clock() - self._written.written_s >= self._write_interval_s

    def _write(self, attachment: api.Attachment, told: _Told) -> bool:
        """Is a new chunk there?"""
        self.step = "asking for room"
        key, unit = self._random_bytes(api.KEY_BYTES), self._random_bytes(UNIT_BYTES)
        item = api.ReserveItem(key, 0, 0, TOKENS, (_SIZE,))
        holder_id, epoch = attachment.holder_id, attachment.epoch
        reply = self._service.reserve(api.ReserveRequest(holder_id, epoch, (item,)), deadline_s=self._deadline_s)
        (result,) = reply.results
        if result.outcome is api.ReserveOutcome.NO_SPACE:
            self._writes_worked = False
            told.reasons.append("there is no room for a chunk now")
            return False
        if result.outcome is api.ReserveOutcome.DECLINED:
            return False  # not worth it to the pool's policy, which is an answer, too
        if result.outcome is not api.ReserveOutcome.GRANTED:
            raise _failed(f"room for a new chunk is refused with {result.outcome.value}")
        (extent,) = result.extents
        digest = self._digests.digest_of(unit)
        try:
            self._put(attachment, extent, key, unit, digest)
        except MeshFusionError:
            # It may still land: until this engine is known to be gone, its room is withheld (rule 3). So it goes.
            doubtful = api.AbortRequest(holder_id, epoch, (), (result.grant_id,))
            with contextlib.suppress(MeshFusionError):
                self._service.abort(doubtful, deadline_s=self._deadline_s)
            self._forget()
            raise
        self.step = "committing"
        commit = api.CommitRequest(holder_id, epoch, (api.CommitItem(result.grant_id, ((digest,),)),))
        if self._service.commit(commit, deadline_s=self._deadline_s).committed != (True,):
            raise _failed("a chunk that was written in time was not committed")
        self._writes_worked = True
        self._written = _Written(key, digest, self._clock())
        return True

    def _put(self, attachment: api.Attachment, extent: api.Extent, key: bytes, unit: bytes, digest: bytes) -> None:
        self.step = f"writing to namespace {extent.namespace}"
        header = ChunkHeader(
            pool_uuid=uuid.UUID(attachment.pool_uuid).bytes,
            identity=IDENTITY,
            key=key,
            tenant=CHUNK_TENANT,
            group=0,
            rank=0,
            shard_count=1,
            position_tokens=0,
            token_count=TOKENS,
            segment=extent.segment,
            generation=extent.generation,
            lba=extent.lba,
            unit_bytes=UNIT_BYTES,
            unit_digests=(digest,),
        )
        data = encode_chunk_header(header) + unit
        assert len(data) == extent.lba_count * LBA_BYTES == shard_lba_count(UNIT_BYTES, 1) * LBA_BYTES
        with self._opened(attachment, extent, writable=True) as file, _buffer_of(len(data)) as buffer:
            buffer.view[: len(data)] = data
            file.write_from(extent.lba, buffer.view[: len(data)])
            self.step = f"flushing namespace {extent.namespace}"
            file.flush()

    def _read(self, attachment: api.Attachment, written: _Written) -> bool:
        """Is it found? Raises when what is found is not what was written."""
        self.step = "looking a chunk up"
        self._lookups += 1
        groups = (api.GroupKeys(0, (written.key,), (0,)),)
        request = api.MatchRequest(attachment.holder_id, f"{self._incarnation}-{self._lookups}", TOKENS, groups)
        reply = self._service.match(request, deadline_s=self._deadline_s)
        if not reply.chunk_count:
            return False
        try:
            ((shard,),) = (chunk.shards for chunk in reply.chunks)
            self._prove(attachment, shard, written)
        finally:
            release = api.ReleaseRequest(attachment.holder_id, (reply.lease_id,))
            self._service.release(release, deadline_s=self._deadline_s)
        return True

    def _prove(self, attachment: api.Attachment, shard: api.Shard, written: _Written) -> None:
        extent = shard.extent
        self.step = f"reading from namespace {extent.namespace}"
        with (
            self._opened(attachment, extent, writable=False) as file,
            _buffer_of(extent.lba_count * LBA_BYTES) as buffer,
        ):
            view = buffer.view[: extent.lba_count * LBA_BYTES]
            file.read_into(extent.lba, view)
            data = bytes(view)
        header = decode_chunk_header(data, where=f"the header at block {extent.lba}")
        unit = data[header_lba_count(1) * LBA_BYTES :][:UNIT_BYTES]
        if header.key != written.key or self._digests.digest_of(unit) != written.digest:
            raise _failed(f"at block {extent.lba} of namespace {extent.namespace} lie other bytes than were written")

    @contextmanager
    def _opened(self, attachment: api.Attachment, extent: api.Extent, *, writable: bool) -> Iterator[DataFile]:
        path = next((n.path for n in attachment.namespaces if n.nsid == extent.namespace), None)
        if path is None:
            raise _failed(f"an extent lies on namespace {extent.namespace}, which the pool does not name")
        with open_data_file(Path(path), writable=writable) as file:
            yield file

    def _forget(self) -> None:
        """The next probe comes as another engine."""
        self._attachment = None
        if self._liveness >= 0:
            os.close(self._liveness)
            self._liveness = -1


def _buffer_of(length_bytes: int) -> AlignedBuffer:
    """Pages may be larger than blocks."""
    return AlignedBuffer(-(-length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)


def _failed(message: str) -> ProbeFailedError:
    return ProbeFailedError(message, next_step="see the service's log, and the drives: mfctl jbof drives")
