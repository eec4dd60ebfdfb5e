"""``mfctl support dump``: what is in the archive, what is not, and what happens to parts that fail."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.jbof.errors import ConfigError, MediaError
from meshfusion.tools.mfctl import support_machine, support_parts
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.support_bundle import MAX_PART_BYTES, Failure, Part, collect, write_bundle
from tests.dpu.pool_cases import Holder
from tests.host.support.waiting import until
from tests.tools.mfctl.service_process import ServiceProcess, small_config

SECRETS = {name: f"planted-{name}-b3f1" for name in ("environment", "key-file", "unknown-field", "bad-value", "yaml")}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


@pytest.fixture(autouse=True)
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has tests of its own, and looks for engines' libraries."""
    monkeypatch.setattr(support_parts, "_doctor", lambda pool, config_path: [{"check": "python", "state": "ok"}])


def unpacked(path: Path) -> dict[str, bytes]:
    """Without the folder that all are in."""
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert all(member.isfile() and member.mode == 0o600 for member in members)
        assert {member.name.split("/")[0] for member in members} == {path.name.split(".")[0]}
        files = {member.name.partition("/")[2]: archive.extractfile(member) for member in members}
        return {name: file.read() for name, file in files.items() if file is not None}


def check_manifest(files: dict[str, bytes]) -> Any:
    manifest = json.loads(files["manifest.json"])
    listed = {entry["name"]: (entry["length_bytes"], entry["sha256"]) for entry in manifest["files"]}
    there = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    del there["manifest.json"]
    assert listed == there
    return manifest


def test_a_bundle_of_a_service_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSION_TOKEN", SECRETS["environment"])
    with ServiceProcess(small_config(tmp_path)) as service:
        keys = tmp_path / "pool" / "keys"
        keys.mkdir(exist_ok=True)
        (keys / "host.key").write_text(SECRETS["key-file"])
        client = GrpcChunkService(service.address)
        holder = Holder(client)
        assert holder.put(1)
        output = tmp_path / "bundle.tar.gz"
        command = ("support", "dump", "--config", str(service.config), "--output", str(output))
        result = run(*command, "--log", str(service.log_path))
        assert result.exit_code == 0, result.stderr
        client.close()
        os.close(holder.lock)

    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    files = unpacked(output)
    manifest = check_manifest(files)
    assert manifest["failed"] == []
    assert json.loads(files["service/state.json"])["pid"] == service.process.pid
    assert b"meshfusion-index" in files["service/stacks.txt"]
    assert b"VmRSS" in files["service/process.txt"]
    assert json.loads(files["pool/status.json"])["committed_chunk_count"] == 1
    assert [h["holder_id"] for h in json.loads(files["pool/holders.json"])] == [holder.id]
    assert json.loads(files["pool/index.json"])["chunk_count"] == 1
    assert [drive["number"] for drive in json.loads(files["pool/drives.json"])] == [0]
    assert json.loads(files["config.json"])["pool"]["path"] == str(tmp_path / "pool")
    assert b"created pool" in files["service/log.txt"]
    assert json.loads(files["machine/versions.json"])["packages"]["grpcio"]
    assert "version" in json.loads(files["machine/kernel.json"])
    assert {"machine/nvme.json", "machine/rdma.json", "doctor.json"} <= files.keys()
    assert_no_secrets(files)


def assert_no_secrets(files: dict[str, bytes]) -> None:
    for name, data in files.items():
        for what, secret in SECRETS.items():
            assert secret.encode() not in data, f"the {what} secret is in {name}"


@pytest.mark.parametrize(
    "more",
    [
        f"password: {SECRETS['unknown-field']}\n",
        f"stop_grace_s: {SECRETS['bad-value']}\n",
        f"log: {{level: {SECRETS['yaml']}\n",
    ],
)
def test_a_configuration_with_mistakes_is_not_shown(tmp_path: Path, more: str) -> None:
    config, output = small_config(tmp_path, more), tmp_path / "bundle.tar.gz"
    result = run("support", "dump", "--config", str(config), "--output", str(output))
    assert result.exit_code == 0, result.stderr
    files = unpacked(output)
    assert "not_shown" in json.loads(files["config.json"])
    assert_no_secrets({**files, "stdout": result.stdout.encode(), "stderr": result.stderr.encode()})


def test_a_service_that_is_gone_costs_its_parts_only(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar.gz"
    address = f"unix://{tmp_path}/nobody"
    result = run("support", "dump", "--service", address, "--log", str(tmp_path / "no.log"), "--output", str(output))
    assert result.exit_code == 5, result.stderr
    assert f"the service at {address} does not tell its state: what it knows is missing" in result.stderr
    assert "wrote" in result.stdout
    assert "left out: service/stacks.txt: the chunk service at" in result.stderr
    files = unpacked(output)
    failed = {failure["part"]: failure for failure in check_manifest(files)["failed"]}
    assert {"service/state.json", "service/stacks.txt", "pool/status.json", "service/log.txt"} <= failed.keys()
    assert "cannot be reached" in failed["service/state.json"]["error"]
    assert "Start it with" in failed["service/state.json"]["next_step"]
    assert "FileNotFoundError" in failed["service/log.txt"]["error"]
    assert "machine/versions.json" in files


def test_a_configured_service_that_is_away_is_told_and_its_pool_is_looked_at(tmp_path: Path) -> None:
    config, output = small_config(tmp_path), tmp_path / "bundle.tar.gz"
    with ServiceProcess(config):
        pass  # which makes the pool
    command = ("support", "dump", "--config", str(config), "--output", str(output), "--format", "json")
    result = run(*command)
    assert result.exit_code == 5, "nobody serves it"
    told = json.loads(result.stdout)
    assert {"service/state.json", "service/stacks.txt"} <= {failure["part"] for failure in told["failed"]}
    files = unpacked(output)
    assert json.loads(files["pool/status.json"])["path"] == str(tmp_path / "pool"), "from the medium"
    assert "pool/drives.json" in files


def test_without_anything_named_it_is_of_the_machine(tmp_path: Path) -> None:
    output = tmp_path / "bundle.tar.gz"
    result = run("support", "dump", "--output", str(output), "--format", "json")
    told = json.loads(result.stdout)
    assert (told["path"], told["failed"]) == (str(output), [])
    assert set(told["files"]) == {name for name in unpacked(output) if name != "manifest.json"}
    output.unlink()
    assert "note: no service is known of" in run("support", "dump", "--output", str(output)).stderr


# ---- parts -------------------------------------------------------------------------------------------------------


def raising(error: Exception) -> Any:
    def make() -> object:
        raise error

    return make


def test_a_part_that_fails_costs_the_others_nothing() -> None:
    collected = collect(
        [
            Part("a.txt", raising(MediaError("the medium is gone", next_step="plug it in"))),
            Part("b.txt", lambda: "text\n"),
            Part("c.txt", raising(KeyError(SECRETS["bad-value"]))),
            Part("d.json", lambda: {"x": b"\x01"}),
        ]
    )
    assert collected.files == {"b.txt": b"text\n", "d.json": b'{\n  "x": "01"\n}\n'}
    first, second = collected.failures
    assert first == Failure("a.txt", "the medium is gone", "plug it in")
    assert second.error.startswith("KeyError at test_support.py:")
    assert SECRETS["bad-value"] not in second.error, "what an exception quotes is not passed on"


def test_a_part_that_hangs_is_given_up() -> None:
    hold = threading.Event()
    collected = collect([Part("a.txt", lambda: str(hold.wait(30.0))), Part("b.txt", lambda: "b")], deadline_s=0.05)
    hold.set()
    assert collected.failures == (Failure("a.txt", "was not there after 0.05 s"),)
    assert collected.files == {"b.txt": b"b"}


def test_a_part_that_is_too_long_is_cut() -> None:
    collected = collect([Part("a.txt", lambda: "x" * (MAX_PART_BYTES + 5))])
    data = collected.files["a.txt"]
    assert data.endswith(f"x\n(cut off: {MAX_PART_BYTES + 5} bytes in all)\n".encode())
    assert len(data) < MAX_PART_BYTES + 100


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        write_bundle(path, collect([]), facts={}, now_s=0.0)
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["bundle.tar.gz"]


def test_facts_of_a_machine(tmp_path: Path) -> None:
    """Of one that has what this one may not."""
    made = {
        "sys/class/nvme/nvme0/model": "Fast Drive\n",
        "sys/class/nvme/nvme0/serial": "S123\n",
        "sys/class/nvme/nvme0/nvme0n1/queue/logical_block_size": "4096\n",
        "sys/class/infiniband/mlx5_0/fw_ver": "32.41\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "proc/modules": "nvme_rdma 1 0 - Live 0x0\next4 1 0 - Live 0x0\n",
        "proc/meminfo": "MemTotal: 1 kB\nA: 1\nB: 1\nC: 1\nD: 1\nE: 1\nHugePages_Total: 3\n",
    }
    for name, text in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (controller,) = support_machine.nvme(tmp_path)
    assert (controller["name"], controller["model"], controller["firmware_rev"]) == ("nvme0", "Fast Drive", None)
    assert controller["namespaces"][0]["queue_logical_block_size"] == "4096"
    assert "S123" not in json.dumps(controller)
    (device,) = support_machine.rdma(tmp_path)
    assert (device["fw_ver"], device["ports"]["1"]["state"]) == ("32.41", "4: ACTIVE")
    kernel = support_machine.kernel(tmp_path)
    assert kernel["modules"] == ["nvme_rdma"]
    assert kernel["memory"][-1] == "HugePages_Total: 3"


def test_the_end_of_a_log_begins_with_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first line\nsecond line\n\xff third\n")
    assert support_machine.last_lines(log) == "first line\nsecond line\n\ufffd third\n"
    assert support_machine.last_lines(log, 15) == "\ufffd third\n"


def test_sigusr1_tells_stacks_without_any_call(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        service.process.send_signal(signal.SIGUSR1)
        until(lambda: "in run_service" in service.log)
        assert "(most recent call first)" in service.log
        service.process.send_signal(signal.SIGTERM)
        assert service.end() == 0, "it goes on"
