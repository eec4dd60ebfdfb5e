"""What is served at which path. The page for people, ``/``, may be put in by whoever makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
    """``others``: added to these, such as ``/``. Each of several pools has a page, too: their names are words of a few
    plain letters."""
    return {
        "/metrics": lambda: Page(200, CONTENT_TYPE, metrics.text()),
        "/healthz": lambda: _answered(health.alive()),
        "/readyz": lambda: _answered(health.ready()),
        "/status.json": lambda: _answered(health.status()),
        **{f"/pools/{name}/status.json": partial(_status_of, health, name) for name in health.names},
        **(others or {}),
    }


def _status_of(health: Health, name: str) -> Page:
    return _answered(health.status_of(name))


def _answered(answer: HealthAnswer) -> Page:
    return Page(200 if answer.is_good else 503, JSON_TYPE, to_json(answer.body))
