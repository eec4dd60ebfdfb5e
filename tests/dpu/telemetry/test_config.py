"""The telemetry part of the service's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.config import load_service_config
from meshfusion.dpu.config_telemetry import TelemetryConfig
from meshfusion.jbof.config_problems import ConfigProblemsError


def checked(tmp_path: Path, telemetry: str) -> TelemetryConfig:
    path = tmp_path / "service.yaml"
    path.write_text(
        f"listen: 127.0.0.1:7\npool: {{path: {tmp_path}/pool, create: true, size: 512MiB}}\ntelemetry: {telemetry}\n"
    )
    return load_service_config(path).telemetry


def test_off_unless_asked_for(tmp_path: Path) -> None:
    assert checked(tmp_path, "{}").listen is None


@pytest.mark.parametrize(
    "telemetry",
    [
        "{listen: '127.0.0.1:9477'}",
        "{listen: '[::1]:9477'}",
        "{listen: 'localhost:9477'}",
        "{listen: 'unix:///tmp/telemetry.sock'}",
        "{listen: '0.0.0.0:9477', allow_public: true}",
    ],
)
def test_taken(tmp_path: Path, telemetry: str) -> None:
    assert checked(tmp_path, telemetry).listen is not None


@pytest.mark.parametrize(
    ("telemetry", "field", "parts"),
    [
        ("{listen: '0.0.0.0:9477'}", "telemetry.listen", ("can be reached from other machines", "allow_public: true")),
        ("{listen: 'box:9477'}", "telemetry.listen", ("can be reached from other machines", "127.0.0.1:PORT")),
        ("{listen: 9477}", "telemetry.listen", ("must be",)),
        ("{listen: nonsense}", "telemetry.listen", ("is not an address", "127.0.0.1:PORT")),
        ("{slow_call_s: 0}", "telemetry.slow_call_s", ("must be more than 0",)),
        ("{probe_interval_s: -1}", "telemetry.probe_interval_s", ("must be more than 0",)),
        ("{listen: '127.0.0.1:7'}", "telemetry.listen", ("is where engines connect, too", "use another")),
        ("{listen: 'localhost:7'}", "telemetry.listen", ("is where engines connect, too", "use another")),
        ("{listen: '0.0.0.0:7', allow_public: true}", "telemetry.listen", ("is where engines connect, too",)),
        (
            "{listen: 'unix:///no/such/t'}",
            "telemetry.listen",
            ("directory /no/such does not exist", "mkdir -p /no/such"),
        ),
        ("{listne: '127.0.0.1:1'}", "telemetry.listne", ("listen",)),
    ],
)
def test_refused_with_field_and_fix(tmp_path: Path, telemetry: str, field: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigProblemsError) as caught:
        checked(tmp_path, telemetry)
    (problem,) = caught.value.problems
    assert (problem.field, problem.line) == (field, 3)
    text: Any = f"{problem.problem} {problem.fix}"
    for part in parts:
        assert part in text
