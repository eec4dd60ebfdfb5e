"""Makes vLLM's own ``OffloadingConnector`` with its ``fs`` tier run on the CPU backend, to be compared with.

vLLM's ``TieringOffloadingSpec`` does everything here: lookup, the primary tier in host memory, the files of the ``fs``
tier and their threads. It refuses the CPU platform in one place only (``get_worker`` of ``v1/kv_offload/cpu/spec.py``),
because its worker copies with GPU streams. This module replaces that device copy, and nothing else, with plain copies
on a thread of their own, so that a copy does not hold up the engine, as it would not on a GPU.

Named in ``kv_connector_extra_config`` as ``spec_name: CpuTieringOffloadingSpec`` with this module's name as
``spec_module_path``. Written against vLLM 0.32.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies pages between the engine's KV memory and the primary tier's region. One block a chunk."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._kv_caches = kv_caches
        self._region = region
        self._host_pages = [region.create_next_worker_view(t.page_size_bytes) for t in kv_caches.tensors]
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="offload-copy")
        self._running: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, copy in self._running.items() if copy.done()]
        return [self._running.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._running.keys():
            self._running[job_id].result()

    def shutdown(self) -> None:
        self._copier.shutdown()
        self._host_pages.clear()
        self._region.cleanup()

    def _submit(self, job_id: int, device: Any, host: Any, *, is_store: bool) -> bool:
        self._running[job_id] = self._copier.submit(self._copy, job_id, device, host, is_store)
        return True

    def _copy(self, job_id: int, device: Any, host: Any, is_store: bool) -> TransferResult:
        started_s, copied_bytes, first = time.monotonic(), 0, 0
        for refs, size in zip(self._kv_caches.group_data_refs, device.group_sizes, strict=True):
            pairs = list(zip(device.block_ids[first : first + size], host.block_ids[first : first + size], strict=True))
            first += size
            for ref in refs:
                length = ref.page_size_bytes
                device_pages = self._kv_caches.tensors[ref.tensor_idx].tensor
                host_pages = self._host_pages[ref.tensor_idx]
                for block, chunk in pairs:
                    device_page, host_page = device_pages[int(block), :length], host_pages[int(chunk), :length]
                    if is_store:
                        host_page.copy_(device_page)
                    else:
                        device_page.copy_(host_page)
                copied_bytes += length * len(pairs)
        return TransferResult(job_id, True, copied_bytes, time.monotonic() - started_s)


class CpuTieringOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiers, with :class:`CopyWorker` for the device copy."""

    _copy_worker: CopyWorker | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, "set no block_size: one engine block is one chunk here"
        if self._copy_worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copy_worker = CopyWorker(kv_caches, region)
        return self._copy_worker
