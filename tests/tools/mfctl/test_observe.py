"""mfctl events, mfctl trace and mfctl top, as a user meets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.dpu.api.event_types import Severity
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.trace_types import Trace, TracedCall
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.dpu.tenancy import PoolRouter, TenantPool
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.top_rates import RATES, Look, hit_share, rates, top_object
from tests.dpu.api.fake_service import make_status
from tests.dpu.telemetry.fakes import FakePool, make_drive


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


@pytest.fixture
def log() -> EventLog:
    log = EventLog(unix_time_s=lambda: 1_700_000_000.25)
    log.tell("drive_state", "drive 1 is gone\x1b[2J", severity=Severity.ERROR, drive=1)
    log.tell("saves_stopped", "no room")
    return log


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def address(log: EventLog, pool: FakePool, tmp_path: Path) -> Iterator[str]:
    server = serve(pool, f"unix://{tmp_path}/s", admin=pool, events=log)
    yield server.address
    log.close()
    server.stop(0.0)


def test_events_as_a_table(address: str) -> None:
    result = run("events", "--service", address)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == ["SEQUENCE", "TIME", "SEVERITY", "KIND", "WHAT"]
    assert lines[1].split(maxsplit=4)[:4] == ["1", "2023-11-14T22:13:20Z", "error", "drive_state"]
    assert "\x1b" not in result.output
    assert lines[2].endswith("no room")
    assert len(lines) == 3


def test_events_for_programs(address: str) -> None:
    expected = {
        "sequence": 2,
        "time_s": 1_700_000_000.25,
        "kind": "saves_stopped",
        "severity": "error",
        "text": "no room",
        "pool": "",
        "fields": {},
    }
    assert json.loads(run("events", "--service", address, "--after", "1", "--format", "json").output) == [expected]
    assert yaml.safe_load(run("events", "--service", address, "--after", "1", "--format", "yaml").output) == [expected]


def test_events_of_one_of_several_pools(tmp_path: Path) -> None:
    log, pools = EventLog(), {"red": FakePool(), "lab": FakePool()}
    log.of_pool("red").tell("saves_stopped", "no room")
    log.of_pool("lab").tell("saves_stopped", "the same")
    log.tell("certificate_problem", "of all")
    router = PoolRouter({name: TenantPool(cast(Any, pool), frozenset({name})) for name, pool in pools.items()})
    server = serve(router, f"unix://{tmp_path}/s", pools=router, events=log)
    try:

        def texts(*arguments: str) -> list[str]:
            found = run("events", "--service", server.address, *arguments)
            assert found.exit_code == 0, found.output
            return [line.split(maxsplit=4)[4] for line in found.output.splitlines()][1:]

        assert texts() == ["red: no room", "lab: the same", "of all"]
        assert texts("--pool", "red") == ["red: no room", "of all"]
        wrong = run("events", "--service", server.address, "--pool", "rde")
        assert wrong.exit_code != 0
        assert "has no pool 'rde'" in wrong.output
    finally:
        log.close()
        server.stop(0.0)


@pytest.mark.parametrize("output_format", ["table", "json", "yaml"])
def test_events_followed_to_the_end_of_the_service(address: str, log: EventLog, output_format: str) -> None:
    log.tell("service_stops", "it ends")
    log.close()
    result = run("events", "--service", address, "--follow", "--format", output_format)
    assert result.exit_code == 0
    if output_format == "table":
        texts = [line.split(maxsplit=4)[4] for line in result.output.splitlines()]
    elif output_format == "json":
        texts = [json.loads(line)["text"] for line in result.output.splitlines()]
    else:
        texts = [document["text"] for document in yaml.safe_load_all(result.output)]
    assert texts[1:] == ["no room", "it ends"]


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        mfctl.main(list(arguments), prog_name="mfctl")
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("command", [("events",), ("events", "--follow"), ("top", "--once")])
def test_nobody_there(command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command, "--service", f"unix://{tmp_path}/none", "--format", "json") == 5
    assert "cannot be reached" in json.loads(capsys.readouterr().err)["error"]["message"]
    assert exit_code(*command, str(tmp_path), "--format", "json") == 5
    assert "no service serves the pool" in json.loads(capsys.readouterr().err)["error"]["message"]
    assert exit_code(*command) == 2
    assert exit_code(*command, str(tmp_path), "--service", "127.0.0.1:1") == 2


def look(taken_s: float, epoch: int = 3, **counters: int) -> Look:
    return Look(taken_s, make_status(epoch=epoch, counters=tuple(counters.items())), (make_drive(),))


def test_rates_are_of_the_time_between() -> None:
    before = look(10.0, match_keys=100, matched_chunks=50, committed_bytes=1000)
    now = look(14.0, match_keys=140, matched_chunks=60, committed_bytes=9000, dropped_chunks=2)
    found = rates(before, now)
    zero = dict.fromkeys(RATES, 0.0)
    assert found == zero | {
        "looked_up_chunks": 10.0, "hit_chunks": 2.5, "saved_bytes": 2000.0, "damaged_chunks": 0.5
    }  # fmt: skip
    assert hit_share(found) == 0.25
    assert hit_share(zero) is None


@pytest.mark.parametrize(
    "now", [look(14.0, epoch=4, match_keys=500), look(14.0, match_keys=1), look(10.0, match_keys=100)]
)
def test_no_rates_over_a_new_beginning(now: Look) -> None:
    before = look(10.0, match_keys=100)
    assert rates(before, now) is None
    assert top_object(before, now)["hit_share"] is None


def test_every_rate_is_of_a_counter_that_the_service_has() -> None:
    from meshfusion.dpu.telemetry.table import METRICS

    assert set(RATES.values()) <= {source for metric in METRICS.values() for _, source in metric.source}


def test_top_once_for_programs(address: str, pool: FakePool) -> None:
    pool.current_drives = (make_drive(0), make_drive(1, state="gone", percentage_used=-1, months_left=float("inf")))
    result = run("top", "--service", address, "--once", "--interval", "0.1", "--format", "json")
    found: dict[str, Any] = json.loads(result.output)
    assert found["per_second"] == dict.fromkeys(RATES, 0.0)
    assert found["interval_s"] >= 0.1
    assert [(d["state"], d["percentage_used"], d["months_left"]) for d in found["drives"]] == [
        ("online", 7, 40.0),
        ("gone", None, None),
    ]
    assert [holder["holder_id"] for holder in found["holders"]] == ["h-1"]
    assert found["segments"] == {"free": 60, "open": 1, "sealed": 3, "quarantined": 1}


def test_top_for_people(address: str, pool: FakePool) -> None:
    pool.current_status = replace(pool.current_status, saves_stopped_reason="no room", exports_problem="gone")
    result = run("top", "--service", address, "--once", "--interval", "0.1")
    assert result.exit_code == 0
    for text in ("STOPPED: no room", "NOT AS THEY SHOULD BE: gone", "lookups", "0.0", "h-1", "online"):
        assert text in result.output


class Traces:
    """A ``TraceSource`` that knows the request "r"."""

    def trace(self, request_id: str) -> Trace:
        calls = (
            TracedCall(1_700_000_000.25, "Match", 0.0015, "OK", "r", (("chunks_asked", 5), ("chunks_matched", 3))),
            TracedCall(1_700_000_001.5, "Reserve", 0.25, "FAILED_PRECONDITION", "several\x1b[2J"),
        )
        return Trace(calls if request_id == "r" else (), 0.0 if request_id == "new" else 1_699_999_999.0)


@pytest.fixture
def traces_at(pool: FakePool, tmp_path: Path) -> Iterator[str]:
    server = serve(pool, f"unix://{tmp_path}/t", traces=Traces())
    yield server.address
    server.stop(0.0)


def test_trace_as_a_table(traces_at: str) -> None:
    result = run("trace", "r", "--service", traces_at)
    assert result.exit_code == 0
    assert [line.split(maxsplit=5) for line in result.output.splitlines()] == [
        ["ENDED", "CALL", "TOOK", "OUTCOME", "WHAT"],
        ["2023-11-14T22:13:20.250Z", "Match", "1.50", "ms", "OK", "chunks asked: 5, chunks matched: 3"],
        ["2023-11-14T22:13:21.500Z", "Reserve", "250.00", "ms", "FAILED_PRECONDITION"],
    ]


def test_trace_for_programs(traces_at: str) -> None:
    first, second = json.loads(run("trace", "r", "--service", traces_at, "--format", "json").output)
    assert first == {
        "time_s": 1_700_000_000.25,
        "call": "Match",
        "seconds": 0.0015,
        "code": "OK",
        "sent_under": "r",
        "counts": {"chunks_asked": 5, "chunks_matched": 3},
    }
    assert (second["code"], second["counts"]) == ("FAILED_PRECONDITION", {})


def test_trace_of_an_unknown_request(traces_at: str, tmp_path: Path) -> None:
    unknown = run("trace", "x\x1b[2J", "--service", traces_at, "--format", "json")
    assert unknown.exit_code == 1
    error = json.loads(unknown.stderr)["error"]
    assert error["message"] == (
        "no call of request 'x\\x1b[2J' is among those that the service remembers, which reach back to "
        "2023-11-14T22:13:19.000Z"
    )
    assert "engine's log" in error["next_step"]
    assert "reach back" not in run("trace", "new", "--service", traces_at).stderr
    assert run("trace", "r").exit_code == 2
    assert run("trace", "r", "--service", f"unix://{tmp_path}/none").exit_code == 5
