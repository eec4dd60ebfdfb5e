"""A service of several pools as a process, and mfctl before it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.errors import PoolBusyError
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.support_parts import parts_of, subject_of
from tests.dpu.pool_cases import Holder, key, make_pool
from tests.dpu.telemetry.fakes import wait_until


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


def config_of(tmp_path: Path, more: str = "") -> Path:
    path = tmp_path / "service.yaml"
    sizes = "create: true, size: 16MiB, segment_size: 2MiB"
    path.write_text(
        f"listen: unix://{tmp_path}/s\n"
        "pools:\n"
        f"  r: {{tenants: [red], pool: {{path: {tmp_path}/red, {sizes}}}}}\n"
        f"  s: {{tenants: [blue, green], pool: {{path: {tmp_path}/shared, {sizes}}}, medium: {{policy: everything}}}}\n"
        f"audit: {{path: {tmp_path}/audit.log}}\n{more}"
    )
    return path


def asked(tmp_path: Path, page: str) -> tuple[int, bytes]:
    """As a monitor does."""
    with closing(HTTPConnection("localhost", timeout=20)) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(20)
        connection.sock.connect(str(tmp_path / "t"))
        connection.request("GET", page)
        response = connection.getresponse()
        return response.status, response.read()


def by_pool(tmp_path: Path, metric: str) -> dict[str, float]:
    families = text_string_to_metric_families(asked(tmp_path, "/metrics")[1].decode())
    samples = (sample for family in families for sample in family.samples if sample.name == metric)
    return {sample.labels["pool"]: sample.value for sample in samples}


def started(config: Path, *arguments: str) -> subprocess.Popen[str]:
    code = "from meshfusion.tools.mfctl.main import service_main; service_main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "--config", str(config), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[dict[str, object]]:
    yield from running(config_of(tmp_path))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[dict[str, object]]:
    """One that is probed, too."""
    yield from running(config_of(tmp_path, f"telemetry: {{listen: unix://{tmp_path}/t, probe_interval_s: 0.5}}\n"))


def running(config: Path) -> Iterator[dict[str, object]]:
    process = started(config, "--format", "json")
    assert process.stdout is not None
    timer = threading.Timer(60.0, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    yield json.loads(line)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log


def test_the_whole_life(ready: dict[str, object], tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    assert ready["address"] == address
    uuids = ready["pools"]
    assert isinstance(uuids, dict)
    assert list(uuids) == ["r", "s"]
    client = GrpcChunkService(address)
    with Holder(client, tenant="red") as red, Holder(client, tenant="green") as green:
        assert (red.attachment.pool_uuid, green.attachment.pool_uuid) == (uuids["r"], uuids["s"])
        assert red.put(0)
        at = ("--service", address, "--format", "json")
        status = json.loads(run("pool", "status", *at, "--pool", "r").stdout)
        assert (status["committed_chunk_count"], status["pool_uuid"]) == (1, uuids["r"])
        assert json.loads(run("pool", "status", *at, "--pool", "s").stdout)["committed_chunk_count"] == 0
        assert key(0).hex() in run("chunk", "list", "--service", address, "--pool", "r").stdout
        assert key(0).hex() not in run("chunk", "list", "--service", address, "--pool", "s").stdout
        assert run("chunk", "show", key(0).hex(), "--service", address, "--pool", "r").exit_code == 0
        refused = run("pool", "status", *at)
        assert refused.exit_code != 0
        assert "has several pools" in refused.output
        assert "--pool: r, s" in refused.output
    client.close()
    # A pool's directory is name enough: which of the service's it is stands in it.
    for path, numbers in ((tmp_path / "red", [0, 1]), (tmp_path / "shared", [0])):
        if len(numbers) > 1:
            assert run("jbof", "add", str(path), "--size", "16MiB").exit_code == 0
        drives = json.loads(run("jbof", "drives", str(path), "--format", "json").output)["drives"]
        assert [drive["number"] for drive in drives] == numbers
    assert run("config", "check", str(tmp_path / "service.yaml")).exit_code == 0


def is_given_up(pool: Path, tenants: frozenset[str]) -> bool:
    """The service's answer comes before its end."""
    try:
        Pool.open(pool, tenants=tenants).close()
    except PoolBusyError:
        return False
    return True


def test_it_drains_all_its_pools_and_reloads(ready: dict[str, object], tmp_path: Path) -> None:
    config, address = tmp_path / "service.yaml", str(ready["address"])
    config.write_text(config.read_text() + "log: {level: debug}\n")
    assert "applied: log.level is debug (was info)\n" in run("service", "reload", "--config", str(config)).stdout
    client = GrpcChunkService(address)
    blue = Holder(client, tenant="blue")
    assert blue.put(0)
    assert blue.match(0).lease_id
    drained = run("service", "drain", "--service", address, "--deadline", "0.5", "--format", "json")
    assert drained.exit_code == 1, "a lease of the second pool is still out"
    assert json.loads(drained.stdout)["open_lease_count"] == 1
    client.close()
    os.close(blue.lock)
    for name, tenants in (("red", {"red"}), ("shared", {"blue", "green"})):
        wait_until(partial(is_given_up, tmp_path / name, frozenset(tenants)), f"{name} is given up")
    pid = ready["pid"]
    assert isinstance(pid, int)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # whose end nothing is to be sent to


def test_monitors_are_told_of_each_pool_by_its_name(watched: dict[str, object], tmp_path: Path) -> None:
    """The probe is let into either as one of its tenants, and is found out by bytes that it did not write."""
    address = str(watched["address"])
    wait_until(lambda: asked(tmp_path, "/readyz")[0] == 200, "a chunk was written and read in each")
    body = json.loads(asked(tmp_path, "/readyz")[1])
    assert {name: probe["status"] for name, probe in body["pools"].items()} == {"r": "ok", "s": "ok"}
    client = GrpcChunkService(address)
    with Holder(client, tenant="red") as red:
        assert red.put(0)
        assert by_pool(tmp_path, "meshfusion_chunks_committed_total") == {"r": 2, "s": 1}, "and the probe's in each"
        assert by_pool(tmp_path, "meshfusion_match_keys_total") == {"r": 0, "s": 0}, "the probe's are in none"
    client.close()
    assert by_pool(tmp_path, "meshfusion_pool_answers") == {"r": 1, "s": 1}
    status = json.loads(asked(tmp_path, "/status.json")[1])
    assert {name: told["pool"]["path"] for name, told in status["pools"].items()} == {
        "r": f"{tmp_path}/red", "s": f"{tmp_path}/shared"
    }  # fmt: skip
    code, page = asked(tmp_path, "/pools/s/status.json")
    of_shared = json.loads(page)
    assert (code, of_shared["pool"]["path"]) == (200, f"{tmp_path}/shared")
    assert str(tmp_path / "red") not in page.decode()
    assert {event["pool"] for event in of_shared["events"]} == {"s"}
    assert asked(tmp_path, "/pools/other/status.json")[0] == 404

    with (tmp_path / "shared" / "data").open("r+b") as file:  # all but the first MiB, where labels are
        file.seek(1 << 20)
        file.write(bytes(2 << 20))
        os.fsync(file.fileno())
    wait_until(lambda: asked(tmp_path, "/readyz")[0] == 503, "the next probe sees it")
    body = json.loads(asked(tmp_path, "/readyz")[1])
    assert (body["status"], body["pools"]["r"]["status"], body["pools"]["s"]["status"]) == ("failing", "ok", "failing")
    assert all(reason.startswith("pool s: reading from namespace 1") for reason in body["reasons"])
    events = json.loads(run("events", str(tmp_path / "red"), "--format", "json").stdout)
    assert {event["pool"] for event in events} == {"r"}
    told = run("events", "--service", address, "--pool", "s").stdout
    assert "s: the probe of pool s is failing: reading from namespace 1" in told


def test_top_and_support_find_the_pool_by_its_directory_or_name(ready: dict[str, object], tmp_path: Path) -> None:
    address, uuids = str(ready["address"]), ready["pools"]
    assert isinstance(uuids, dict)
    once = ("--once", "--interval", "0.1", "--format", "json")
    assert json.loads(run("top", str(tmp_path / "shared"), *once).stdout)["pool_uuid"] == uuids["s"]
    assert json.loads(run("top", "--service", address, "--pool", "r", *once).stdout)["pool_uuid"] == uuids["r"]
    subject = subject_of(tmp_path / "service.yaml", None, None, None)
    assert (subject.address, subject.pool) == (address, None)
    named = subject_of(None, None, tmp_path / "shared", None)
    assert (named.address, named.pool_name) == (address, "s")
    (status,) = [part for part in parts_of(named) if part.name == "pool/status.json"]
    assert uuids["s"] in json.dumps(status.make())


def test_a_name_without_a_service_is_refused(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    for command in (("pool", "status"), ("chunk", "list")):
        result = run(*command, str(tmp_path / "pool"), "--pool", "red")
        assert result.exit_code == 2
        assert "--pool is for --service" in result.output


def test_all_pools_or_none(tmp_path: Path) -> None:
    """The first is not served while the second cannot be; it is another's to have then."""
    config = config_of(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "file").touch()
    process = started(config)
    out, err = process.communicate(timeout=60)
    assert (process.returncode != 0, out) == (True, "")
    assert f"{tmp_path}/shared" in err
    assert "Traceback" not in err


def test_config_check_tells_notes_and_problems_of_each_pool(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    make_pool(tmp_path / "red")
    result = run("config", "check", str(config))
    assert result.exit_code == 0, result.output
    assert "note: pools.r.pool.size = 16MiB has no effect" in result.output
    config.write_text(config.read_text().replace("[red]", "[blue]"))
    result = run("config", "check", str(config))
    assert result.exit_code != 0
    assert "pools.s.tenants = 'blue': is a tenant of pools.r already" in result.output
