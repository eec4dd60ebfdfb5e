"""``mfctl exports rekey``: a service in a process of its own, an engine that is attached, and a stand-in for SPDK."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.host.pool_standing import PoolStanding
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.export.fake_spdk import FakeSpdk
from tests.dpu.export.fake_subsystem import Fault
from tests.dpu.export.rpc_server import RpcServer, error, result
from tests.dpu.pool_cases import IDENTITY
from tests.host.support.waiting import until
from tests.tools.mfctl.service_process import ServiceProcess, small_config

EXPORTS = """
leases: {heartbeat_s: 0.2}
exports:
  target: spdk
  portals: ["tcp://127.0.0.1:4420"]
  spdk: {socket: %s, memory: 1GiB, connections: 4}
"""


class SocketSpdk:
    """The stand-in behind a socket."""

    def __init__(self, path: Path) -> None:
        self.spdk, self._lock = FakeSpdk(), threading.Lock()
        self._server = RpcServer(path, self._answer)

    def _answer(self, request: dict[str, Any]) -> bytes:
        method, parameters = request["method"], request.get("params", {})
        with self._lock:
            try:
                value = self.spdk.call(method, parameters)
            except Fault as fault:
                told = error({"code": fault.code, "message": fault.message})(request)
                assert isinstance(told, bytes)
                return told
        told = result(value)(request)
        assert isinstance(told, bytes)
        return told

    @property
    def host_keys(self) -> dict[str, str | None]:
        """By host, the name of the key that it is asked for."""
        return {host: key for there in self.spdk.subsystems.values() for host, key in there.hosts.items()}

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def spdk(tmp_path: Path) -> Iterator[SocketSpdk]:
    spdk = SocketSpdk(tmp_path / "rpc")
    yield spdk
    spdk.close()


@contextlib.contextmanager
def engine(address: str) -> Iterator[PoolStanding]:
    client = GrpcChunkService(address)
    standing = PoolStanding(
        client,
        identity=IDENTITY,
        engine_version="1",
        rank_count=1,
        access=api.Access.NVMEOF,
        tell=lambda event: None,
    )
    try:
        standing.start()
        yield standing
    finally:
        standing.leave(patience_s=5.0)
        client.close()


def holder_of(standing: PoolStanding) -> str:
    assert standing.current is not None
    return standing.current.attachment.holder_id


def key_of(standing: PoolStanding) -> str:
    current = standing.current
    assert current is not None
    assert current.attachment.export is not None
    return current.attachment.export.host_key


def rekey(address: str, *arguments: str) -> Result:
    return CliRunner().invoke(mfctl, ["exports", "rekey", "--service", address, *arguments])


def test_every_engine_gets_a_new_key_and_none_is_cut_off(tmp_path: Path, spdk: SocketSpdk) -> None:
    with (
        ServiceProcess(small_config(tmp_path, EXPORTS % (tmp_path / "rpc"))) as service,
        engine(service.address) as one,
        engine(service.address) as two,
    ):
        holders = {holder_of(standing): standing for standing in (one, two)}
        former = {key_of(one), key_of(two)}
        spdk_keys = spdk.host_keys
        assert len(former) == 2
        done = rekey(service.address)
        assert done.exit_code == 0, done.output
        rows = [line.split() for line in done.stdout.splitlines()[1:]]
        assert rows == [[holder, "done"] for holder in sorted(holders)]
        assert {key_of(one), key_of(two)}.isdisjoint(former)
        assert spdk.host_keys.keys() == spdk_keys.keys()
        assert set(spdk.host_keys.values()).isdisjoint(spdk_keys.values())
        files = [path.read_text().strip() for path in (tmp_path / "pool" / "holders").glob("*.key")]
        assert sorted(files) == sorted([key_of(one), key_of(two)])

        before = key_of(one), key_of(two)
        alone = rekey(service.address, "--holder", holder_of(one), "--format", "json")
        assert json.loads(alone.stdout) == {"keys": [{"holder_id": holder_of(one), "change": "done"}]}
        assert key_of(one) != before[0]
        assert key_of(two) == before[1]
        records = [json.loads(line) for line in (tmp_path / "pool" / "audit.log").read_text().splitlines()]
        told = [record["outcome"] for record in records if "ReplaceKeys" in str(record)]
        assert told == ["begun", "ok", "begun", "ok"]
        assert "DHHC" not in service.log + (tmp_path / "pool" / "audit.log").read_text()


def test_what_cannot_be_is_told(tmp_path: Path, spdk: SocketSpdk) -> None:
    with ServiceProcess(small_config(tmp_path, EXPORTS % (tmp_path / "rpc"))) as service:
        nobody = rekey(service.address, "--holder", "nobody")
        assert nobody.exit_code == 1
        assert "holder 'nobody' does not reach this pool through its exports" in nobody.stderr
        assert rekey(service.address, "--pool", "red").exit_code == 1
        none = rekey(service.address)
        assert (none.exit_code, none.stdout) == (0, "no engine reaches the exports\n")


def test_without_exports_there_are_no_keys(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        refused = rekey(service.address)
        assert refused.exit_code == 1
        assert "exports nothing over NVMe-oF" in refused.stderr


def test_an_engine_of_an_earlier_release_keeps_its_key(tmp_path: Path, spdk: SocketSpdk) -> None:
    with ServiceProcess(small_config(tmp_path, EXPORTS % (tmp_path / "rpc"))) as service:
        client = GrpcChunkService(service.address)
        request = api.AttachRequest("old", "vllm", "1", "h", 7, IDENTITY, rank_count=1, access=api.Access.NVMEOF)
        attachment = client.attach(request, deadline_s=10.0)
        client.heartbeat(api.HeartbeatRequest("old", attachment.epoch, ()), deadline_s=5.0)
        refused = rekey(service.address, "--wait", "0.5")
        assert refused.exit_code == 1
        assert "its engine has not said that it takes new keys" in refused.stdout
        assert attachment.export is not None
        (file,) = (tmp_path / "pool" / "holders").glob("*.key")
        until(lambda: file.read_text().strip() == attachment.export.host_key)  # type: ignore[union-attr]
        client.close()
