"""What an engine tells of its paths, and what it is told to do with them, as bytes of JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.report import PathReport
from meshfusion.jbof.errors import FormatError

MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Page:
    """Of one engine process. ``written_s``: by the wall clock. ``opened_ns``: of two in one process, the later one is
    that of the paths in use."""

    pid: int
    pool_uuid: str
    written_s: float
    opened_ns: int
    paths: tuple[PathReport, ...]


def page_name(pid: int) -> str:
    return f"paths-{pid}.json"


def orders_name(pid: int) -> str:
    return f"paths-{pid}.orders"


def page_object(page: Page) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "pid": page.pid,
        "pool_uuid": page.pool_uuid,
        "written_s": page.written_s,
        "opened_ns": page.opened_ns,
        "paths": [{**report._asdict(), "state": report.state.value} for report in page.paths],
    }


def encode_page(page: Page) -> bytes:
    return json.dumps(page_object(page)).encode()


def decode_page(raw: bytes, where: str) -> Page:
    """Members that are not known are left alone. Raises :class:`~meshfusion.jbof.errors.FormatError`."""
    try:
        read = _object(json.loads(raw))
        return Page(
            _number(read["pid"]),
            _text(read["pool_uuid"]),
            _real(read["written_s"]),
            _number(read["opened_ns"]),
            tuple(_report(_object(report)) for report in _list(read["paths"])),
        )
    except (ValueError, KeyError, RecursionError) as error:
        raise FormatError(
            f"{where} does not tell of paths: {error!r}",
            next_step="Use an mfctl of the engine's version, or remove the file.",
        ) from error


def encode_orders(disabled: Iterable[str]) -> bytes:
    return json.dumps(sorted(disabled)).encode()


def decode_orders(raw: bytes, where: str) -> frozenset[str]:
    """Names of paths to be disabled; all others are enabled. Raises :class:`~meshfusion.jbof.errors.FormatError`."""
    try:
        return frozenset(_text(name) for name in _list(json.loads(raw)))
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where} is not a list of names of paths: {error!r}",
            next_step="Remove the file and use `mfctl path disable` and `mfctl path enable`.",
        ) from error


def _report(read: dict[str, Any]) -> PathReport:
    return PathReport(
        _text(read["name"]),
        PathState(read["state"]),
        _truth(read["is_measured"]),
        _real(read["bandwidth_bytes_per_s"]),
        _real(read["latency_s"]),
        _number(read["outstanding_bytes"]),
        _number(read["read_bytes"]),
        _number(read["written_bytes"]),
        _text(read["last_error"]),
        _truth(read["is_disabled"]),
    )


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not an object")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number from 0 up")
    return value


def _real(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a finite number from 0 up")
    return float(value)
