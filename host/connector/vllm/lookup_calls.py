"""Lookups on their way to the service and back: what is asked, in whose trace, and how long it takes."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from meshfusion.dpu.api.tracing import REQUEST_ID, Span, Tracer
from meshfusion.host.connector.observations import Observations
from meshfusion.host.connector.vllm.chunking import Chunking
from meshfusion.host.connector.vllm.request_trace import trace_of
from meshfusion.host.pool_client import PoolClient
from meshfusion.host.pool_events import Matched


class _Begun(NamedTuple):
    at_s: float
    span: Span


class LookupCalls:
    """Lives in the scheduler. ``patience_s``: how long one may wait for its turn and its answer."""

    def __init__(
        self,
        client: PoolClient,
        chunking: Chunking,
        observations: Observations,
        tracer: Tracer,
        *,
        patience_s: float,
    ) -> None:
        self._client = client
        self._chunking = chunking
        self._observations = observations
        self._tracer = tracer
        self._patience_s = patience_s
        self._begun: dict[tuple[str, int], _Begun] = {}  # by request and attempt
        self.counters: Counter[str] = Counter()

    @property
    def unanswered_count(self) -> int:
        return len(self._begun)

    def start(self, now_s: float, request: Any, attempt: int, identity: bytes) -> None:
        """For the leading chunks of ``request``, as far as it may resume after them."""
        form, request_id = self._chunking.form, request.request_id
        hashes = self._chunking.chunk_hashes(request, 0, form.boundary_max(request.num_tokens))
        keys = self._chunking.keys(request, identity)
        span = self._tracer.begin("meshfusion.lookup", trace_of(request), {REQUEST_ID: request_id})
        self._begun[request_id, attempt] = _Begun(now_s, span)
        self.counters["tokens_looked_up"] += len(hashes) * form.chunk_tokens
        self._client.match(request_id, attempt, lambda: keys.asked(hashes), now_s + self._patience_s, span.headers)

    def answered(self, now_s: float, answer: Matched) -> None:
        """Every one is, once, also when its request is gone."""
        begun = self._begun.pop((answer.request_id, answer.attempt))
        begun.span.end({"meshfusion.chunks": answer.stored.chunk_count})
        self._observations.add("lookup_seconds", now_s - begun.at_s)
        self.counters["tokens_matched"] += answer.stored.chunk_count * self._chunking.form.chunk_tokens
