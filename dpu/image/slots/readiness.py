"""Whether a service is ready, from what it answers over HTTP (docs/observability.md). No I/O."""

from __future__ import annotations

import json
from typing import Any

from meshfusion.dpu.image.slots.types import Probed


def judged(ready: bytes | None, status: bytes | None) -> Probed:
    """``ready``, ``status``: the bodies of ``/readyz`` and ``/status.json``, None for no answer. Of a service with
    several pools, each has to be ready, and each to have written."""
    body, told = _object(ready), _object(status)
    version = str(told.get("version", ""))
    if not body:
        return Probed(is_ready=False, has_written=False, version=version, reason="the service does not answer")
    pools = body.get("pools")
    each = [entry for entry in pools.values() if isinstance(entry, dict)] if isinstance(pools, dict) else [body]
    is_ready = body.get("status") == "ok"
    reasons = body.get("reasons")
    said = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
    return Probed(
        is_ready=is_ready,
        has_written=bool(each) and all(entry.get("written_age_s") is not None for entry in each),
        version=version,
        reason="" if is_ready else f"it says {body.get('status')}" + (f": {said}" if said else ""),
    )


def _object(data: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(data or b"")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
