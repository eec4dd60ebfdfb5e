"""What is served at which path. The page for people, ``/``, may be put in by whoever makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.telemetry.collector import CONTENT_TYPE, Metrics
from meshfusion.dpu.telemetry.health import Health, HealthAnswer, to_json

JSON_TYPE: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Page:
    """``code``: HTTP's status. ``headers``: besides the usual ones."""

    code: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Pages = Mapping[str, Callable[[], Page]]


def pages_of(metrics: Metrics, health: Health, others: Pages | None = None) -> Pages:
    """``others``: added to these, such as ``/``."""
    return {
        "/metrics": lambda: Page(200, CONTENT_TYPE, metrics.text()),
        "/healthz": lambda: _answered(health.alive()),
        "/readyz": lambda: _answered(health.ready()),
        "/status.json": lambda: _answered(health.status()),
        **(others or {}),
    }


def _answered(answer: HealthAnswer) -> Page:
    return Page(200 if answer.is_good else 503, JSON_TYPE, to_json(answer.body))
