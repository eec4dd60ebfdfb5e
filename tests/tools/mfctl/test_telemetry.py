"""A daemon as monitors see it: scraped, asked for its health, watched, by other readers than ours where there are."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.telemetry.table import METRICS
from tests.dpu.pool_cases import Holder
from tests.dpu.telemetry.fakes import wait_until

DEADLINE_S = 20.0


class Daemon:
    """``monitor``: the path of the socket that monitors ask."""

    def __init__(self, folder: Path, **telemetry: Any) -> None:
        self.monitor, self.folder = folder / "t", folder
        self.address, self.pool = f"unix://{folder}/s", str(folder / "pool")
        settings = {"listen": f"unix://{self.monitor}", "probe_interval_s": 0.5, "slow_call_s": 0.0001, **telemetry}
        config = {
            "listen": self.address,
            "pool": {"path": f"{folder}/pool", "create": True, "size": "16MiB", "segment_size": "1MiB"},
            "leases": {"heartbeat_s": 0.5, "lease_ttl_s": 20, "holder_silence_s": 1, "grant_ttl_s": 20},
            "drives": {"check_interval_s": 0.5},
            "log": {"level": "debug", "format": "json"},
            "telemetry": settings,
        }
        (folder / "service.json").write_text(json.dumps(config))
        code = "from meshfusion.tools.mfctl.main import service_main; service_main()"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--config", str(folder / "service.json")],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        timer = threading.Timer(60.0, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        timer.cancel()
        assert self.ready.startswith("ready"), self.log.read_text()

    def ask(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost", timeout=DEADLINE_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(DEADLINE_S)
        connection.sock.connect(str(self.monitor))
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body

    def object(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask(path)[1])
        return found

    def values(self) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(self.ask("/metrics")[1].decode())
        return {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels) if sample.labels[name])): sample.value
            for family in families
            for sample in family.samples
        }

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE_S)


Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Daemon] = []

    def make(**telemetry: Any) -> Daemon:
        started.append(Daemon(tmp_path, **telemetry))
        return started[-1]

    yield make
    for daemon in started:
        daemon.process.kill()
        daemon.process.communicate()


def test_metrics_are_the_tables_and_tell_what_an_engine_did(start: Start) -> None:
    daemon = start(probe=False)
    client = GrpcChunkService(daemon.address)
    holder = Holder(client)
    for i in range(3):
        assert holder.put(i)
    reply = holder.match(0, 1, 2, 3)
    assert reply.chunk_count == 3
    wait_until(lambda: ("meshfusion_drive_read_latency_seconds", "0") in daemon.values(), "the drive is looked at")
    values = daemon.values()
    stems = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name, *_ in values}
    lacking = {name for name in METRICS if name not in stems}
    assert lacking == {
        *("meshfusion_probe_seconds", "meshfusion_probe_age_seconds"),  # it is off
        *("meshfusion_drive_percentage_used", "meshfusion_drive_months_left"),  # a file does not tell
        *("meshfusion_drive_written_bytes", "meshfusion_drive_media_errors", "meshfusion_drive_spare_percentage"),
        *("meshfusion_drive_write_budget_left_bytes", "meshfusion_drive_write_budget_limit_bytes"),  # no bound is set
    }
    assert stems <= METRICS.keys()
    expected = {
        ("meshfusion_match_keys_total",): 4,
        ("meshfusion_match_chunks_total",): 3,
        ("meshfusion_chunks_committed_total",): 3,
        ("meshfusion_committed_bytes_total",): 3 * 3 * 65536,
        ("meshfusion_payload_bytes",): 3 * 3 * 65536,
        ("meshfusion_chunks",): 3,
        ("meshfusion_reserve_items_total", "granted"): 3,
        ("meshfusion_leases",): 1,
        ("meshfusion_grants",): 0,
        ("meshfusion_holders", "live"): 1,
        ("meshfusion_rpc_total", "Match", "OK"): 1,
        ("meshfusion_rpc_total", "Commit", "OK"): 3,
        ("meshfusion_rpc_seconds_count", "Reserve"): 3,
        ("meshfusion_pool_answers",): 1,
        ("meshfusion_epoch",): 1,
        ("meshfusion_probe_state", "unknown"): 1,
    }
    assert {key: values[key] for key in expected} == expected
    assert values["process_resident_memory_bytes",] > 10e6
    taken = sum(path.stat().st_blocks * 512 for path in (daemon.folder / "pool" / "index").iterdir())
    assert values["meshfusion_index_bytes",] == taken

    assert holder.reserve(9).outcome.value == "granted"
    wait_until(lambda: daemon.values()["meshfusion_grant_age_seconds_max",] > 0.3, "the grant gets older")
    assert daemon.values()["meshfusion_grant_age_seconds_max",] < DEADLINE_S

    holder.release(reply)
    holder.leave()
    client.close()
    watcher = subprocess.Popen(
        [sys.executable, "-m", "meshfusion.tools.mfctl.main", "events", "--follow", "--format", "json", daemon.pool],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["kind"] == "epoch_began"
    wait_until(lambda: daemon.values()["meshfusion_holders", "live"] == 0, "a look sees that it has left")
    daemon.stop()
    output, _ = watcher.communicate(timeout=DEADLINE_S)
    assert [json.loads(line)["kind"] for line in output.splitlines()] == [
        *("holder_attached", "holder_detached", "service_stops")
    ]
    assert watcher.returncode == 0
    assert daemon.process.returncode == 0
    assert not daemon.monitor.exists()


def test_ready_by_a_real_write_and_read_and_not_when_the_medium_lies(start: Start) -> None:
    daemon = start()
    wait_until(lambda: daemon.ask("/readyz")[0] == 200, "the first probe passes")
    assert daemon.ask("/healthz") == (200, b'{"status": "ok", "reasons": []}\n')
    assert daemon.object("/readyz")["status"] == "ok"
    data = daemon.folder / "pool" / "data"
    with data.open("r+b") as file:  # all but the first MiB, where labels are
        file.seek(1 << 20)
        file.write(bytes(2 << 20))
        os.fsync(file.fileno())
    wait_until(lambda: daemon.ask("/readyz")[0] == 503, "the next one does not")
    body = daemon.object("/readyz")
    assert body["status"] == "failing"
    assert "reading from namespace 1" in body["reasons"][0]
    status = daemon.object("/status.json")
    assert status["ready"]["status"] == "failing"
    assert [event["kind"] for event in status["events"]][-1] == "probe_changed"
    assert status["pool"]["epoch"] == 1
    assert [drive["state"] for drive in status["drives"]] == ["online"]


def test_a_request_is_found_in_the_log_by_its_id(start: Start) -> None:
    daemon = start(probe=False)
    client = GrpcChunkService(daemon.address)
    with Holder(client) as holder:
        holder.match(0)  # "r" is its request
    client.close()
    of_request = [line for line in daemon.lines() if line.get("request_id") == "r"]
    assert [line["logger"] for line in of_request] == ["meshfusion.access"]
    assert of_request[0]["message"].startswith("Match took ")
    assert of_request[0]["level"] == "warning", "everything is slow here"
    slow = daemon.object("/status.json")["slow_calls"]
    assert [(call["call"], call["code"]) for call in slow if call["request_id"] == "r"] == [("Match", "OK")]


def test_a_request_is_traced_and_the_page_is_there(start: Start) -> None:
    daemon = start(probe=False)
    client = GrpcChunkService(daemon.address)
    with Holder(client) as holder:
        holder.put(0)
        holder.release(holder.match(0, 1))  # "r" is its request
        status = daemon.object("/status.json")
    client.close()
    (of_drive,) = status["segment_map"]["drives"]
    assert (of_drive["drive"], of_drive["segment_count"], of_drive["cell_segments"]) == (0, 15, 1)
    cells = [dict(zip(status["segment_map"]["fields"], cell, strict=True)) for cell in of_drive["cells"]]
    assert sum(cell["open"] for cell in cells) == status["pool"]["segments_open"] == 1
    assert sum(cell["free"] for cell in cells) == status["pool"]["segments_free"] == 14
    code, page = daemon.ask("/")
    assert (code, page.startswith(b"<!DOCTYPE html>")) == (200, True)
    traced = subprocess.run(
        [sys.executable, "-m", "meshfusion.tools.mfctl.main", "trace", "r", daemon.pool, "--format", "json"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert [(call["call"], call["code"], call["counts"]) for call in json.loads(traced.stdout)] == [
        ("Match", "OK", {"chunks_asked": 2, "chunks_matched": 1}),
        ("Release", "OK", {"leases_released": 1}),
    ]


def test_stopped_process_is_not_alive_for_others_and_is_again(start: Start) -> None:
    daemon = start(probe=False)
    assert daemon.ask("/healthz")[0] == 200
    daemon.process.send_signal(signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0.5)
        connection.connect(str(daemon.monitor))
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.ask("/healthz")[0] == 200


def test_a_taken_address_leaves_no_pool_behind(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(AssertionError, match=r"telemetry\.listen: \S+ exists and is not a socket"):
        Daemon(tmp_path)
    assert not (tmp_path / "pool").exists()
    shutil.rmtree(tmp_path)
