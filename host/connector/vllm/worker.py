"""The worker's half: proves the layout at start, then carries out load and save orders."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from meshfusion.dpu.api.types import Attachment
from meshfusion.host.connector.config import ConnectorConfig
from meshfusion.host.connector.vllm.auditor import Auditor
from meshfusion.host.connector.vllm.messages import StepOrders, StepReport, WorkerFacts
from meshfusion.host.connector.vllm.path_slot import PathSlot
from meshfusion.host.connector.vllm.worker_loads import WorkerLoads
from meshfusion.host.connector.vllm.worker_proof import prove_worker
from meshfusion.host.connector.vllm.worker_saves import WorkerSaves
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.drift import UnitNumbers
from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.kv_memory import KvMemory
from meshfusion.host.path.cpus import engine_cpus
from meshfusion.host.path.opening import PathOpener
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.worker")

CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Of a worker whose KV memory is known."""

    memory: KvMemory
    slot: PathSlot
    loads: WorkerLoads
    saves: WorkerSaves
    auditor: Auditor


class WorkerSide:
    """Lives in the process of the worker ``rank``. All methods are called on the engine's thread and never wait for the
    medium; those of a step only after :meth:`register`."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        *,
        rank: int,
        is_digest_right: Callable[[bytes, bytes], bool],
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._rank = rank
        self._is_digest_right = is_digest_right
        self._known: _Parts | None = None

    # ---- start ---------------------------------------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> WorkerFacts:
        """Derive the layout, prove it, and compute the identity. Raises UnsupportedError at any doubt (rule 6)."""
        proof = prove_worker(self._vllm_config, self._kv_cache_config, kv_caches, self._config, rank=self._rank)
        self.use(proof.memory.memory, proof.memory.layouts, proof.facts.form, proof.numbers)
        return proof.facts

    def use(
        self,
        memory: KvMemory,
        layouts: tuple[GroupLayout, ...],
        form: ChunkForm,
        numbers: tuple[UnitNumbers, ...] = (),
    ) -> None:
        """From now on this is the engine's KV memory, proven to be laid out like that; it is closed at shutdown.
        ``numbers``: what it holds, for audits."""
        opener = PathOpener(
            memory=memory,
            layouts=layouts,
            units_per_shard=tuple(plan.kept_blocks_max for plan in form.plans),
            load_threads=self._config.load_threads,
            direct_io=self._config.direct_io,
            cpus=engine_cpus(),
            is_digest_right=self._is_digest_right,
            key_scope=self._config.key_scope,
        )
        slot = PathSlot(partial(opener.open, self._config.path.kind))
        self._known = _Parts(
            memory,
            slot,
            WorkerLoads(form, self._rank),
            WorkerSaves(slot, form, self._rank),
            Auditor(memory, layouts, numbers, form=form, rank=self._rank),
        )

    # ---- each step -----------------------------------------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        parts = self.parts
        self._follow(orders.attachment)
        path = parts.slot.path_to(orders.attachment)
        for order in orders.loads:
            is_opening = parts.slot.is_opening_to(orders.attachment)
            if is_opening and (path is None or not parts.slot.reaches(order.namespaces)):
                parts.loads.wait(order, time.monotonic())
            else:
                parts.loads.start(order, path)

    def start_saves(self, orders: StepOrders) -> None:
        """The step that filled these blocks has run: their bytes are final."""
        parts = self.parts
        parts.saves.start(orders.saves)
        for order in orders.audits:
            parts.auditor.start(order, parts.slot.path_to(orders.attachment))

    def finished_loads(self) -> set[str]:
        """Requests whose load has ended, well or not; each is returned exactly once."""
        self._advance()
        return self.parts.loads.take_finished(time.monotonic())

    def take_failed_blocks(self) -> set[int]:
        return self.parts.loads.take_failed_blocks()

    def take_failed_requests(self) -> set[str]:
        """Of those whose loads have ended, the ones of which nothing may be used."""
        return self.parts.loads.take_failed_requests()

    def take_report(self) -> StepReport | None:
        """What happened since the last step, or None when there is nothing new to say."""
        self._advance()
        parts = self.parts
        change = parts.slot.take_change()
        report = StepReport(
            parts.saves.take_reports(),
            parts.loads.take_reports(),
            () if change is None else (replace(change, rank=self._rank),),
            parts.auditor.take_reports(),
        )
        return None if report == StepReport() else report

    def shutdown(self) -> None:
        parts = self._known
        if parts is None:
            return
        parts.loads.abandon_all("the engine is shutting down")
        is_quiet = parts.slot.close(deadline_s=CLOSE_S)
        has_compared = parts.auditor.close(deadline_s=CLOSE_S)
        if not (is_quiet and has_compared):
            return  # all stays held, so that nobody reuses what we may still read or write
        self._known = None
        parts.saves.let_go()
        try:
            parts.memory.close()
        except MeshFusionError:
            logger.exception("the KV memory is not given up before the engine ends")

    # ---- inside --------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> _Parts:
        """Once the KV memory is known; also for tests that look in."""
        assert self._known is not None, "a step of a worker whose KV memory is not known"
        return self._known

    def _follow(self, attachment: Attachment | None) -> None:
        """Take up a new attachment once nothing of the former one is being written."""
        parts = self.parts
        if attachment is not None:
            parts.saves.told(attachment)
        self._advance()
        parts.slot.follow(attachment, is_writing=parts.saves.is_writing)
        if not parts.saves.is_writing:
            parts.saves.let_go()
            parts.saves.start_waiting()

    def _advance(self) -> None:
        """What waited for a path begins when that is open, fails when it cannot be opened, and is not waited for
        longer than its load may take."""
        parts, now_s = self.parts, time.monotonic()
        if parts.slot.advance():
            parts.loads.path_decided(parts.slot.path, now_s)
            parts.saves.start_waiting()
        parts.loads.give_up_late(now_s)
