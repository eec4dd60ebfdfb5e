"""Pinned memory of the host, and the copies between it and KV memory on a CUDA device, in a stream of their own.

A copy that was begun cannot be called back: until the event behind it is done, the device may write where it goes and
read where it comes from. So neither is given to anybody before that, whatever fails meanwhile; and where the driver
does not tell any more, never (a driver that fails so has lost its context, and the engine with it).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np

from meshfusion.host.kv.group_layout import I64
from meshfusion.host.memory.cuda_driver import CudaDriver, CudaError, in_context
from meshfusion.host.memory.cuda_facts import CudaPlace
from meshfusion.host.memory.kv_memory import CopyLostError
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.buffer import AlignedBuffer

logger = logging.getLogger("meshfusion.path")

_FIRST_POLL_S: Final = 0.00002
_POLL_S: Final = 0.0005
_ALARM_S: Final = 10.0


class UnitDigests(Protocol):
    """Keeps the contract of :class:`~meshfusion.host.memory.torch_digest.TorchDigest`."""

    def digest_units(self, run_offsets: I64, run_bytes: int) -> list[bytes]: ...


class _Copy(NamedTuple):
    """Between ``staging_offset`` of the buffer and ``offset`` of the KV memory."""

    staging_offset: int
    offset: int


class CudaStaging:
    """Keeps :class:`~meshfusion.host.memory.kv_memory.Staging` for the KV memory at ``place``.

    ``digests`` are the device's, ``kernels`` digest on the host. ``on_close`` is called when nothing is left of it.
    """

    def __init__(
        self,
        driver: CudaDriver,
        place: CudaPlace,
        digests: UnitDigests,
        kernels: DigestKernels,
        size_bytes: int,
        *,
        on_close: Callable[[CudaStaging], None],
    ) -> None:
        self._driver = driver
        self._place = place
        self._digests = digests
        self._kernels = kernels
        self._on_close = on_close
        self._buffer = AlignedBuffer(size_bytes, huge_pages=True)
        self._lost_why = ""
        self._loading: tuple[I64, int] | None = None  # run offsets and the length of a run
        with in_context(driver, place.context):
            self._event = driver.create_event()
            try:
                self._stream = driver.create_stream()
                try:
                    driver.pin_host(self._buffer.array.ctypes.data, size_bytes)
                except CudaError:
                    driver.destroy_stream(self._stream)
                    raise
            except CudaError:
                driver.destroy_event(self._event)
                self._buffer.close()
                raise

    @property
    def buffer(self) -> AlignedBuffer:
        if self._lost_why:
            raise CopyLostError(self._lost_why, next_step="Start the engine again.")
        assert self._loading is None, "a copy is under way"
        return self._buffer

    def begin_load(self, stride_bytes: int, run_offsets: I64, run_bytes: int) -> None:
        assert self._loading is None, "a copy is under way"
        self._begin(self._driver.copy_to_device, 0, stride_bytes, run_offsets, run_bytes)
        self._loading = run_offsets, run_bytes

    def end_load(self) -> list[bytes]:
        assert self._loading is not None, "no load was begun"
        run_offsets, run_bytes = self._loading
        self._wait()
        self._loading = None
        return self._digests.digest_units(run_offsets, run_bytes)

    def save(self, offset_bytes: int, stride_bytes: int, run_offsets: I64, run_bytes: int) -> list[bytes]:
        self._begin(self._copy_from_device, offset_bytes, stride_bytes, run_offsets, run_bytes)
        self._wait()
        digests = self._digests.digest_units(run_offsets, run_bytes)
        unit_count, run_count = run_offsets.shape
        staged_at = offset_bytes + stride_bytes * np.arange(unit_count, dtype=np.int64)[:, None]
        staged = self._kernels.digest_units(self._buffer.array, staged_at, run_count * run_bytes)
        if staged != digests:
            raise MediaError(
                "what was copied from the CUDA device is not what it holds",
                next_step="See whether the device is well (nvidia-smi, dmesg: NVRM and Xid).",
            )
        return digests

    def close(self) -> None:
        """Nothing may be under way. What is lost stays pinned and allocated: it is not told closed."""
        if self._lost_why:
            logger.error("pinned memory is kept until the engine ends: %s", self._lost_why)
            return
        assert self._loading is None, "closed under a copy"
        try:
            with in_context(self._driver, self._place.context):
                self._driver.unpin_host(self._buffer.array.ctypes.data)
                self._driver.destroy_stream(self._stream)
                self._driver.destroy_event(self._event)
        except CudaError as error:
            self._lost_why = error.message
            logger.error("pinned memory is kept until the engine ends: %s", error.message)
            return
        self._buffer.close()
        self._on_close(self)

    # ---- copies --------------------------------------------------------------------------------------------------

    def _copy_from_device(self, to: int, source: int, length_bytes: int, stream: int) -> None:
        self._driver.copy_from_device(source, to, length_bytes, stream)

    def _begin(
        self,
        copy: Callable[[int, int, int, int], None],
        offset_bytes: int,
        stride_bytes: int,
        run_offsets: I64,
        run_bytes: int,
    ) -> None:
        """``copy``: of the address in the KV memory, that in the buffer, a length and a stream."""
        unit_count, run_count = run_offsets.shape
        assert unit_count > 0
        assert offset_bytes + (unit_count - 1) * stride_bytes + run_count * run_bytes <= self._buffer.size_bytes
        assert run_offsets.min() >= 0, "a run lies outside the memory"
        assert run_offsets.max() + run_bytes <= self._place.length_bytes, "a run lies outside the memory"
        staging = self.buffer.array.ctypes.data
        failed: CudaError | None = None
        with in_context(self._driver, self._place.context):
            try:
                for staging_offset, offset in _copies(offset_bytes, stride_bytes, run_offsets, run_bytes):
                    copy(self._place.address + offset, staging + staging_offset, run_bytes, self._stream)
            except CudaError as error:
                failed = error
            try:
                self._driver.record_event(self._event, self._stream)
            except CudaError as error:
                raise self._lost(error) from error
        if failed is not None:
            self._wait()  # for those before the one that failed
            raise failed

    def _wait(self) -> None:
        """However long it takes: no time that passes makes it safe."""
        alarm_s = time.monotonic() + _ALARM_S
        poll_s = _FIRST_POLL_S
        while not self._is_done():
            if time.monotonic() >= alarm_s:
                alarm_s += _ALARM_S
                logger.error("a copy on the CUDA device does not end: its blocks are kept from use until it does")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _POLL_S)

    def _is_done(self) -> bool:
        try:
            with in_context(self._driver, self._place.context):
                return self._driver.is_event_done(self._event)
        except CudaError as error:
            raise self._lost(error) from error

    def _lost(self, error: CudaError) -> CopyLostError:
        self._lost_why = f"the end of a copy cannot be known: {error.message}"
        return CopyLostError(self._lost_why, next_step=error.next_step)


def _copies(offset_bytes: int, stride_bytes: int, run_offsets: I64, run_bytes: int) -> Iterator[_Copy]:
    for unit, offsets in enumerate(run_offsets.tolist()):
        first = offset_bytes + unit * stride_bytes
        for run, offset in enumerate(offsets):
            yield _Copy(first + run * run_bytes, offset)
