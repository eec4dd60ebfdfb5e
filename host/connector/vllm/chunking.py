"""How a vLLM request is cut into chunks, and what their keys are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshfusion.dpu.api.types import GroupKeys
from meshfusion.host.kv.adapters import AdapterDigests
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.freshness import process_started_ns
from meshfusion.host.kv.identity import chunk_key
from meshfusion.host.kv.resume import WholePrefix


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """Makes the keys of one request's chunks, off the scheduler's thread: an adapter's files may have to be read. None
    from any method: this request's adapter is not known for sure."""

    form: ChunkForm
    adapters: AdapterDigests
    lora_request: Any
    identity: bytes

    def of(self, groups: Sequence[int], indexes: Sequence[int], hashes: Sequence[bytes]) -> tuple[bytes, ...] | None:
        """A column each: which chunks they are, and their hashes."""
        adapter = self.adapters.digest(self.lora_request)
        if adapter is None:
            return None
        chunk_tokens = self.form.chunk_tokens
        return tuple(
            chunk_key(self.identity, group, adapter, index * chunk_tokens, chunk_hash)
            for group, index, chunk_hash in zip(groups, indexes, hashes, strict=True)
        )

    def asked(self, hashes: Sequence[bytes]) -> tuple[GroupKeys, ...] | None:
        """What a lookup asks for. ``hashes``: of the request's chunks, from the first on."""
        count = len(hashes)
        asked = []
        for plan in self.form.plans:
            keys = self.of([plan.group] * count, range(count), hashes)
            if keys is None:
                return None
            if isinstance(plan.rule, WholePrefix):
                asked.append(GroupKeys(plan.group, keys, (0,) * count))
                continue
            keys = tuple(key if plan.kept_blocks(i) else b"" for i, key in enumerate(keys))
            asked.append(GroupKeys(plan.group, keys, tuple(plan.first_needed_chunk(i + 1) for i in range(count))))
        return tuple(asked)


class Chunking:
    """``hash_tokens``: of one of the engine's block hashes; a chunk's hash is that of the last of them in it."""

    def __init__(self, form: ChunkForm, *, hash_tokens: int, lora_dtype: str) -> None:
        assert form.chunk_tokens % hash_tokens == 0, (form.chunk_tokens, hash_tokens)
        self.form = form
        self._hashes_per_chunk = form.chunk_tokens // hash_tokens
        self._adapters = AdapterDigests(lora_dtype=lora_dtype, engine_started_ns=process_started_ns())

    def chunk_hashes(self, request: Any, first: int = 0, last: int | None = None) -> list[bytes]:
        """One hash for each full chunk from ``first`` up to ``last``."""
        step = self._hashes_per_chunk
        return list(request.block_hashes[(first + 1) * step - 1 : None if last is None else last * step : step])

    def keys(self, request: Any, identity: bytes) -> RequestKeys:
        return RequestKeys(self.form, self._adapters, request.lora_request, identity)
