"""The daemon as a process over a real pool: start, serve, refuse, stop, survive kill -9."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.errors import FormatError, StaleHolderError, UnsupportedError
from meshfusion.jbof.format import ChunkHeader, encode_chunk_header, header_lba_count, unit_lba_count
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.service_signals import ServiceSignals

DEADLINE_S = 20.0
UNIT_BYTES, UNIT_COUNT = 6_000, 3
KEY, IDENTITY = b"\x07" * 32, b"\x11" * 32

Start = Callable[..., subprocess.Popen[str]]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(
        f"listen: unix://{tmp_path}/s\n"
        f"pool: {{path: {tmp_path}/pool, create: true, size: 16MiB, segment_size: 2MiB}}\n"
        "leases: {heartbeat_s: 0.5, lease_ttl_s: 20, holder_silence_s: 1, grant_ttl_s: 20}\n"
    )
    return path


NO_NVMET = pytest.mark.skipif(
    Path("/sys/kernel/config/nvmet").exists(), reason="needs hardware: a kernel without nvmet"
)


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
        code = "from meshfusion.tools.mfctl.main import service_main; service_main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--config", str(config), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    timer = threading.Timer(60.0, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    return line


def test_it_uses_all_the_descriptors_that_it_may_have(start: Start, config: Path) -> None:
    """Each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fewer = min(512, hard - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fewer, hard))
    try:
        process = start(config)
        ready_line(process)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def attach(client: GrpcChunkService, **changes: object) -> t.Attachment:
    fields: dict[str, object] = {"engine_kind": "vllm", "engine_version": "1", "host": "h", "pid": os.getpid()}
    fields |= {"identity": IDENTITY, "rank_count": 1, **changes}
    request = t.AttachRequest(incarnation=uuid.uuid4().hex, **fields)  # type: ignore[arg-type]
    return client.attach(request, deadline_s=DEADLINE_S)


def save_chunk(client: GrpcChunkService, holder: t.Attachment, key: bytes) -> None:
    """What a shim does: reserve, write data and header, flush, commit."""
    size = t.ShardSize(0, UNIT_BYTES, UNIT_COUNT)
    request = t.ReserveRequest(holder.holder_id, holder.epoch, (t.ReserveItem(key, 0, 0, 64, (size,)),))
    (result,) = client.reserve(request, deadline_s=DEADLINE_S).results
    assert result.outcome is t.ReserveOutcome.GRANTED
    (extent,) = result.extents
    units = [np.full(UNIT_BYTES, 7 + i, np.uint8) for i in range(UNIT_COUNT)]
    kernels = load_kernels(UNIT_BYTES)
    digests = tuple(kernels.digest_runs(unit, np.zeros(1, np.int64), UNIT_BYTES) for unit in units)
    (namespace,) = holder.namespaces
    header = ChunkHeader(
        pool_uuid=uuid.UUID(holder.pool_uuid).bytes,
        identity=IDENTITY,
        key=key,
        tenant="default",
        group=0,
        rank=0,
        shard_count=1,
        position_tokens=0,
        token_count=64,
        segment=extent.segment,
        generation=extent.generation,
        lba=extent.lba,
        unit_bytes=UNIT_BYTES,
        unit_digests=digests,
    )
    with open(namespace.path, "r+b") as data:
        data.seek(extent.lba * namespace.lba_bytes)
        data.write(encode_chunk_header(header))
        for i, unit in enumerate(units):
            lba = extent.lba + header_lba_count(UNIT_COUNT) + i * unit_lba_count(UNIT_BYTES)
            data.seek(lba * namespace.lba_bytes)
            data.write(unit.tobytes())
        data.flush()
        os.fsync(data.fileno())
    commit = t.CommitRequest(holder.holder_id, holder.epoch, (t.CommitItem(result.grant_id, (digests,)),))
    assert client.commit(commit, deadline_s=DEADLINE_S).committed == (True,)


def match_request(holder: t.Attachment, *keys: bytes) -> t.MatchRequest:
    return t.MatchRequest(holder.holder_id, "r", 64, (t.GroupKeys(0, keys, (0,) * len(keys)),))


def test_the_whole_life(config: Path, start: Start, tmp_path: Path) -> None:
    address, pool = f"unix://{tmp_path}/s", str(tmp_path / "pool")
    config.write_text(config.read_text() + "stop_grace_s: 0.5\n")
    process = start(config, "--format", "json")
    ready = json.loads(ready_line(process))
    assert ready["ready"] is True
    assert (ready["address"], ready["pool"], ready["pid"]) == (address, pool, process.pid)

    client = GrpcChunkService(address)
    holder = attach(client)
    liveness = hold_liveness(Path(holder.liveness_path))
    save_chunk(client, holder, KEY)
    reply = client.match(match_request(holder, KEY, b"?" * 32), deadline_s=DEADLINE_S)
    assert [c.key for c in reply.chunks] == [KEY]
    with pytest.raises(UnsupportedError, match="tenant"):
        attach(client, tenant="acme")

    live = json.loads(run("pool", "status", "--service", address, "--format", "json").stdout)
    assert (live["committed_chunk_count"], live["lease_count"], len(live["holders"])) == (1, 1, 1)
    assert live["pool_uuid"] == ready["pool_uuid"]
    beside = json.loads(run("pool", "status", pool, "--format", "json").stdout)
    assert (beside["committed_chunk_count"], beside["pool_uuid"]) == (1, ready["pool_uuid"])
    assert KEY.hex() in run("chunk", "list", pool).stdout
    assert KEY.hex() in run("chunk", "list", "--service", address).stdout
    assert run("chunk", "show", KEY.hex(), pool).stdout == run("chunk", "show", KEY.hex(), "--service", address).stdout
    check = run("pool", "check", pool, "--format", "json")
    assert (check.exit_code, json.loads(check.stdout)["chunks_checked"]) == (0, 1)

    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "SIGTERM: stopping" in log
    assert "draining for at most 0.5 s: 0 writes and 1 leases open" in log
    assert "stopping with 0 writes and 1 leases open" in log
    assert log.rstrip().endswith("stopped")
    assert not (tmp_path / "s").exists()
    os.close(liveness)
    client.close()


def test_killed_and_started_again_it_keeps_its_chunks(config: Path, start: Start, tmp_path: Path) -> None:
    process = start(config)
    assert ready_line(process).startswith(f"ready address=unix://{tmp_path}/s pool={tmp_path}/pool pool_uuid=")
    client = GrpcChunkService(f"unix://{tmp_path}/s")
    holder = attach(client)
    save_chunk(client, holder, KEY)
    process.kill()
    process.wait()
    process = start(config)
    assert ready_line(process).startswith("ready ")
    request = match_request(holder, KEY)
    with pytest.raises(StaleHolderError):
        client.match(request, deadline_s=DEADLINE_S)
    again = attach(client)
    assert again.epoch > holder.epoch
    reply = client.match(match_request(again, KEY), deadline_s=DEADLINE_S)
    assert [c.key for c in reply.chunks] == [KEY]
    client.close()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_second_service_on_the_pool_exits_3(config: Path, start: Start, tmp_path: Path) -> None:
    first = start(config)
    ready_line(first)
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text().replace(f"{tmp_path}/s\n", f"{tmp_path}/other\n"))
    second = start(other, "--format", "json")
    out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (3, "")
    error = json.loads(err.splitlines()[-1])["error"]
    assert error["kind"] == "PoolBusyError"
    assert error["message"].endswith(f"is in use by process {first.pid}, the service at unix://{tmp_path}/s")
    assert f"`service: unix://{tmp_path}/s`, or stop it first: kill {first.pid}" in error["next_step"]
    assert "Traceback" not in err


def test_a_second_service_on_the_socket_is_refused(config: Path, start: Start, tmp_path: Path) -> None:
    ready_line(start(config))
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text().replace("/pool,", "/other-pool,"))
    second = start(other)
    out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (1, "")
    assert "another process already serves on" in err
    assert not (tmp_path / "other-pool").exists()


def test_a_taken_port_leaves_no_pool_behind(config: Path, start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(config.read_text().replace(f"unix://{tmp_path}/s\n", f"127.0.0.1:{port}\n"))
        process = start(config)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert not (tmp_path / "pool").exists()


def test_a_bad_config_is_told_before_anything_is_made(config: Path, start: Start, tmp_path: Path) -> None:
    config.write_text(config.read_text() + "lgo: {level: info}\n")
    process = start(config)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "lgo: unknown key; did you mean log?" in err
    assert not (tmp_path / "pool").exists()


def test_json_log_lines(config: Path, start: Start) -> None:
    config.write_text(config.read_text() + "log: {format: json, level: debug}\n")
    process = start(config)
    ready_line(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    records = [json.loads(line) for line in err.splitlines()]
    assert {"time", "level", "logger", "message"} <= records[0].keys()
    assert records[-1]["message"] == "stopped"


def test_a_signal_while_opening_ends_the_process_and_later_ones_are_kept() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signals = ServiceSignals()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGINT)
        assert ended.value.code == 0
        assert signals.take_endings() == ["SIGINT"]
        signals.defer()
        signal.raise_signal(signal.SIGTERM)
        signals.wait(DEADLINE_S)
        assert signals.take_endings() == ["SIGTERM"]
        signals.wait(0.0)
        assert signals.take_endings() == []
        damage = FormatError("the index is damaged", next_step="mfctl pool rebuild-index")
        signals.damaged(damage)
        with pytest.raises(FormatError) as raised:
            signals.wait(None)
        assert raised.value is damage
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def create(tmp_path: Path) -> Path:
    pool = tmp_path / "made"
    result = run("pool", "create", str(pool), "--size", "16MiB", "--segment-size", "2MiB")
    assert result.exit_code == 0
    assert "7 segments of 2.0 MiB" in result.stdout
    return pool


def test_pool_create_status_check(tmp_path: Path) -> None:
    pool = create(tmp_path)
    status = json.loads(run("pool", "status", str(pool), "--format", "json").stdout)
    assert (status["segment_count"], status["segments_free"], status["committed_chunk_count"]) == (7, 7, 0)
    assert run("pool", "check", str(pool)).stdout == "checked 0 chunks, 0 B\n"
    again = run("pool", "create", str(pool), "--size", "16MiB", "--segment-size", "2MiB")
    assert again.exit_code == 1
    assert "there is a pool in" in again.stderr


@pytest.mark.parametrize("command", [["pool", "status"], ["pool", "check"], ["chunk", "list"]])
def test_what_is_no_pool_exits_4(tmp_path: Path, command: list[str]) -> None:
    result = run(*command, str(tmp_path))
    assert result.exit_code == 4
    assert "next step: " in result.stderr


@pytest.mark.parametrize("command", [["pool", "status"], ["pool", "check"], ["chunk", "list"]])
def test_a_truncated_pool_exits_4(tmp_path: Path, command: list[str]) -> None:
    pool = create(tmp_path)
    os.truncate(pool / "data", 1 << 20)
    result = run(*command, str(pool))
    assert result.exit_code == 4
    assert "truncated" in result.stderr


def test_a_flipped_byte_in_a_chunk_is_found(config: Path, start: Start, tmp_path: Path) -> None:
    process = start(config)
    ready_line(process)
    client = GrpcChunkService(f"unix://{tmp_path}/s")
    holder = attach(client)
    save_chunk(client, holder, KEY)
    chunk = client.get_chunk(KEY, deadline_s=DEADLINE_S)
    assert chunk is not None
    shard = chunk.shards[0]
    with open(holder.namespaces[0].path, "r+b") as data:
        data.seek((shard.extent.lba + shard.payload_lba_offset + shard.unit_lba_count) * 4096 + 17)
        data.write(b"\xff")
    result = run("pool", "check", str(tmp_path / "pool"))
    assert result.exit_code == 4
    assert f"damaged: {KEY.hex()}: unit 1 does not match its digest" in result.stdout
    client.close()


def test_sizes_that_cannot_work(tmp_path: Path) -> None:
    result = run("pool", "create", str(tmp_path / "p"), "--size", "1MiB")
    assert result.exit_code == 1
    assert "too small" in result.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("offset", [20, 4096 + 20])
def test_a_bad_copy_of_the_label_exits_4(tmp_path: Path, offset: int) -> None:
    pool = create(tmp_path)
    with (pool / "data").open("r+b") as data:
        data.seek(offset)
        data.write(b"x")
    result = run("pool", "check", str(pool))
    assert result.exit_code == 4
    assert "checked 0 chunks" in result.stdout
    assert f"copy of its label (byte {offset - 20}) is damaged" in result.stderr
    assert f"mfctl pool repair {pool}" in result.stderr
    as_json = json.loads(run("pool", "check", str(pool), "--format", "json").stdout)
    assert len(as_json["label_problems"]) == 1
    repaired = json.loads(run("pool", "repair", str(pool), "--format", "json").stdout)
    assert repaired["labels_repaired"] == as_json["label_problems"]
    assert run("pool", "check", str(pool), "--rate", "1GiB").exit_code == 0


def test_a_lost_index_is_made_anew(tmp_path: Path) -> None:
    pool = create(tmp_path)
    shutil.rmtree(pool / "index")
    lost = run("pool", "status", str(pool))
    assert lost.exit_code == 4
    assert f"mfctl pool rebuild-index {pool}" in lost.stderr
    result = run("pool", "rebuild-index", str(pool))
    assert result.exit_code == 0
    assert "found 0 chunks in 0 segments, 0 of them scanned" in result.stdout
    told = "with medium.drive_writes_per_day: N, the budget of writes counts as spent"
    assert told in result.stdout
    assert "saves nothing for its first 4.6 h / N, and less than usual for up to 8.0 h" in result.stdout
    as_json = json.loads(run("pool", "rebuild-index", str(pool), "--format", "json").stdout)
    assert as_json["rebuilt"]["report"]["chunks_found"] == 0
    assert run("pool", "status", str(pool)).exit_code == 0


def test_a_target_is_asked_only_where_a_configuration_names_one(tmp_path: Path, config: Path) -> None:
    pool = create(tmp_path)
    (pool / "exported").write_text("nvmet, NQNs x\n")
    assert "--config FILE" in run("pool", "rebuild-index", str(pool)).stderr
    result = run("pool", "rebuild-index", str(pool), "--config", str(config))
    assert result.exit_code == 1
    assert "has no exports, so it names no target" in result.stderr


def test_force_needs_the_drives_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"x" * (9 << 20))
    base = ("pool", "create", str(tmp_path / "p"), "--size", "9MiB", "--segment-size", "1MiB", "--data-path", str(data))
    assert "--force --serial data" in run(*base).stderr
    assert run(*base, "--force").exit_code == 2
    assert run(*base, "--force", "--serial", "other").exit_code == 1
    assert run(*base, "--force", "--serial", "data").exit_code == 0


def test_a_budget_below_a_segment_leaves_no_pool_behind(config: Path, start: Start, tmp_path: Path) -> None:
    """Seven segments: 4 / 7 writes a day hold one at once."""
    sound = config.read_text()
    config.write_text(sound + "medium: {drive_writes_per_day: 0.5}\n")
    process = start(config)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "medium.drive_writes_per_day = 0.5: a quarter of what drive 0 may be written in a day is less" in told
    assert run("config", "check", str(config)).stderr == told, "in the same words"
    assert not (tmp_path / "pool").exists()


def test_a_configuration_is_checked_beside_its_service(config: Path, start: Start, tmp_path: Path) -> None:
    ready_line(start(config))
    assert run("config", "check", str(config)).output == f"{config}: ok\n"
    config.write_text(config.read_text() + "medium: {drive_writes_per_day: 0.5}\n")
    refused = run("config", "check", str(config))
    assert refused.exit_code == 1
    assert "drive_writes_per_day = 0.5" in refused.stderr


def test_a_pool_of_several_drives_is_made_by_the_configuration(config: Path, start: Start, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 16 << 20)
    several = f"2MiB, data_path: [{tmp_path}/a, {tmp_path}/b]"
    config.write_text(config.read_text().replace("2MiB", several) + "medium:\nlog:\n")
    assert run("config", "check", str(config)).output == f"{config}: ok\n"
    process = start(config)
    ready_line(process)
    rows = json.loads(run("jbof", "drives", str(tmp_path / "pool"), "--format", "json").stdout)["drives"]
    assert [(row["number"], row["path"]) for row in rows] == [(0, f"{tmp_path}/a"), (1, f"{tmp_path}/b")]
    process.terminate()
    process.communicate(timeout=60)
    (tmp_path / "b").unlink()
    checked = run("config", "check", str(config))
    assert checked.exit_code == 0
    assert checked.stdout.startswith("warning: drive 1 is away, and what it holds is not found: ")
    as_yaml = yaml.safe_load(run("config", "check", str(config), "--format", "yaml").stdout)
    assert (as_yaml["ok"], len(as_yaml["warnings"]), as_yaml["notes"]) == (True, 1, [])


def test_a_size_without_effect_is_logged(config: Path, start: Start, tmp_path: Path) -> None:
    assert run("pool", "create", str(tmp_path / "pool"), "--size", "9MiB", "--segment-size", "2MiB").exit_code == 0
    process = start(config)
    ready_line(process)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert log.count(f"pool.size = 16MiB has no effect: the pool {tmp_path}/pool exists already, with a size of 9") == 1
    assert "segment_size" not in log


@NO_NVMET
def test_a_target_that_is_not_here_is_told_before_anything_is_made(config: Path, tmp_path: Path, start: Start) -> None:
    with config.open("a") as file:
        file.write("exports: {target: nvmet, portals: ['rdma://10.0.0.1:4420']}\n")
    checked = run("config", "check", str(config))
    assert checked.exit_code != 0
    assert "line 4: exports.target = 'nvmet': /sys/kernel/config/nvmet does not exist; mount configfs" in checked.stderr
    process = start(config)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output) == (checked.exit_code, "")
    assert "/sys/kernel/config/nvmet does not exist" in errors
    assert not (tmp_path / "pool").exists()


def test_a_target_that_never_answers_does_not_hold_up_the_end(config: Path, tmp_path: Path, start: Start) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "spdk.sock"))
        silent.listen(8)
        with config.open("a") as file:
            file.write(
                "exports: {target: spdk, portals: ['rdma://10.0.0.1:4420'], "
                f"spdk: {{socket: {tmp_path}/spdk.sock, memory: 1GiB}}}}\n"
            )
        process = start(config)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10.0)
    assert process.returncode == 0
    assert "the target has not answered" in errors
    successor = start(config)
    assert successor.stdout is not None
    assert successor.stdout.readline().startswith("ready "), "the pool is free when the process has ended"


def test_a_signal_that_another_thread_gets_wakes_the_main_thread() -> None:
    """The kernel gives a process's signal to any thread that does not block it, here to none but the other one."""
    code = """
import os, signal, threading, time
from meshfusion.tools.mfctl.service_signals import ServiceSignals
signals = ServiceSignals()
signals.defer()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
began_s = time.monotonic()
signals.wait(30.0)
print(signals.take_endings(), time.monotonic() - began_s < 20.0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['SIGTERM'] True\n"
