"""Which trace a vLLM request belongs to."""

from __future__ import annotations

from typing import Any

from meshfusion.dpu.api.tracing import Headers, headers_of


def trace_of(request: Any) -> Headers:
    """vLLM's requests have ``trace_headers`` where it is told to trace. ``request``: None for one that is gone."""
    return headers_of(getattr(request, "trace_headers", None))
