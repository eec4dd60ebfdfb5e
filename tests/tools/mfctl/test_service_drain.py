"""``mfctl service drain`` and ``state``, and signals, with a service in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.service_types import (
    DrainRequest,
    Phase,
    ReloadReport,
    ReplacedKey,
    ReplaceKeysRequest,
    ServiceState,
)
from meshfusion.host.pool_events import NOTHING_STORED, Attached, Committed, ReserveFailed
from meshfusion.jbof.errors import ServiceDrainingError, ServiceError, ServiceUnavailableError
from meshfusion.tools.mfctl import service_drain
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.service_drain import drain_service
from tests.dpu.pool_cases import Holder, key
from tests.host.support.chunk_records import number_key
from tests.host.support.pool_client_rig import attached, granted, reserve, wish
from tests.host.support.waiting import until
from tests.tools.mfctl.service_process import ServiceProcess, small_config


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


class Background:
    """A command that takes its time, in a process."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "meshfusion.tools.mfctl.main", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        output, errors = self._process.communicate(timeout=60.0)
        return self._process.returncode, output, errors


def test_a_drain_waits_for_the_writer_and_then_the_service_stops(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        client = GrpcChunkService(service.address)
        holder = Holder(client)
        place = holder.reserve(1)
        state = json.loads(run("service", "status", "--service", service.address, "--format", "json").stdout)
        assert (state["phase"], state["pid"], state["open_write_count"]) == ("serving", service.process.pid, 1)

        drain = Background("service", "drain", "--config", str(service.config), "--deadline", "60")
        until(lambda: phase_of(service) == "draining")
        with pytest.raises(ServiceDrainingError, match="stops within"):
            holder.reserve(2)
        with pytest.raises(ServiceDrainingError):
            Holder(client)
        assert holder.commit(place, holder.write(1, place))

        assert service.end() == 0
        code, output, errors = drain.result()
        assert (code, output) == (0, "drained, and stopped\n")
        assert "1 writes and 0 leases are open" in errors
        client.close()
        os.close(holder.lock)
    with ServiceProcess(service.config) as again:
        client = GrpcChunkService(again.address)
        assert client.get_chunk(key(1), deadline_s=5.0) is not None, "what was committed meanwhile is kept"
        client.close()


def phase_of(service: ServiceProcess) -> str:
    document = json.loads(run("service", "status", "--service", service.address, "--format", "json").stdout)
    return str(document["phase"])


def test_the_log_says_why_a_service_with_nothing_open_stopped(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        assert run("service", "drain", "--service", service.address).exit_code == 0
        assert service.end() == 0
        assert "asked by a call to drain: stopping" in service.log
    with ServiceProcess(service.config) as again:
        again.process.send_signal(signal.SIGTERM)
        assert again.end() == 0
        assert "SIGTERM: stopping" in again.log
        assert "asked by a call" not in again.log


def test_what_a_configuration_names_may_be_gone(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        with service.config.open("a") as file:
            file.write("audit: {path: /no/such/audit.log}\n")
        assert run("config", "check", str(service.config)).exit_code == 1
        refused = run("service", "reload", "--config", str(service.config))
        assert (refused.exit_code, "the directory /no/such does not exist" in refused.stderr) == (1, True)
        assert run("service", "status", "--config", str(service.config)).exit_code == 0
        assert run("service", "drain", "--config", str(service.config)).exit_code == 0
        assert service.end() == 0


def test_a_deadline_that_passes_is_told_and_exits_1(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        client = GrpcChunkService(service.address)
        holder = Holder(client)
        holder.reserve(1)
        command = ("service", "drain", "--service", service.address, "--deadline", "0.3", "--format", "json")
        result = run(*command)
        assert service.end() == 0
        told = json.loads(result.stdout)
        assert (result.exit_code, told["phase"], told["open_write_count"]) == (1, "cut short", 1)
        assert "stopping with 1 writes and 0 leases open: writes are lost" in service.log
        client.close()
        os.close(holder.lock)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path, "stop_grace_s: 3600\n")) as service:
        client = GrpcChunkService(service.address)
        holder = Holder(client)
        holder.reserve(1)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: "draining for at most 3600.0 s: 1 writes and 0 leases open" in service.log)
        service.process.send_signal(signal.SIGTERM)
        assert service.end(20.0) == 0
        assert "SIGTERM: stopping at once" in service.log
        client.close()
        os.close(holder.lock)


def test_a_signal_shortens_a_drain(tmp_path: Path) -> None:
    with ServiceProcess(small_config(tmp_path, "stop_grace_s: 0.2\n")) as service:
        client = GrpcChunkService(service.address)
        holder = Holder(client)
        holder.reserve(1)
        drain = Background("service", "drain", "--service", service.address, "--deadline", "3600")
        until(lambda: "draining for at most" in service.log)
        service.process.send_signal(signal.SIGTERM)
        assert service.end(20.0) == 0
        assert drain.result()[0] == 1
        client.close()
        os.close(holder.lock)


def test_an_engine_ends_its_writes_and_comes_back_to_the_next_life(tmp_path: Path) -> None:
    """A real client over a real service, from the signal to the next life's first hit."""
    config = small_config(tmp_path, "stop_grace_s: 60\nleases: {heartbeat_s: 0.2}\n")
    with ServiceProcess(config) as service, attached(GrpcChunkService(service.address)) as rig:
        place = granted(reserve(rig, wish(1))[0])
        service.process.send_signal(signal.SIGTERM)
        until(lambda: rig.client._standing.asking is None, what="for a heartbeat to tell")
        assert reserve(rig, wish(2)) == [ReserveFailed(2)]
        assert rig.match((number_key(1),)).stored == NOTHING_STORED
        assert rig.client.attachment is not None
        rig.client.settle(place, ((tuple(bytes([i] * 8) for i in range(4)),),))
        assert rig.expect(Committed) == Committed((number_key(1),), ())
        assert service.end() == 0
        assert "stopping with" not in service.log, "nothing was cut short"
        with ServiceProcess(config):
            again = rig.expect(Attached).attachment
            assert again.epoch == rig.attachment.epoch + 1
            assert rig.match((number_key(1),), attempt=2).stored.chunk_count == 1


@pytest.mark.parametrize("arguments", [(), ("--service", "unix:///x", "--config", "/y")])
def test_one_service_must_be_named(arguments: tuple[str, ...]) -> None:
    result = run("service", "drain", *arguments)
    assert result.exit_code == 2
    assert "by either --service ADDRESS or --config FILE" in result.stderr


def test_no_service_exits_5(tmp_path: Path) -> None:
    result = run("service", "drain", "--service", f"unix://{tmp_path}/s")
    assert result.exit_code == 5
    assert "cannot be reached" in result.stderr


@pytest.mark.parametrize("deadline", ["-1", "nan", "86401"])
def test_a_deadline_out_of_range_is_wrong_usage(deadline: str, tmp_path: Path) -> None:
    assert run("service", "drain", "--service", f"unix://{tmp_path}/s", f"--deadline={deadline}").exit_code == 2


# ---- against one that misbehaves ---------------------------------------------------------------------------------


class Scripted:
    """``answers`` to each call of drain; then it is gone, or ``lingers``."""

    def __init__(self, answers: list[ServiceState | Exception], *, lingers: bool = False) -> None:
        self.answers, self.lingers = answers, lingers
        self.asked: list[DrainRequest] = []

    def drain(self, request: DrainRequest, *, deadline_s: float) -> ServiceState:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reload(self, *, deadline_s: float) -> ReloadReport:
        raise AssertionError("not asked for")

    def replace_keys(self, request: ReplaceKeysRequest, *, deadline_s: float) -> tuple[ReplacedKey, ...]:
        raise AssertionError("not asked for")

    def stacks(self, *, deadline_s: float) -> str:
        raise AssertionError("not asked for")

    def state(self, *, deadline_s: float) -> ServiceState:
        if self.lingers:
            return state(Phase.DRAINED)
        raise gone()


def state(phase: Phase, writes: int = 0) -> ServiceState:
    return ServiceState("1", 1, 1.0, phase, 5.0, writes, 0)


def gone() -> ServiceUnavailableError:
    return ServiceUnavailableError("gone", next_step="start it")


def ignore(state: ServiceState) -> None:
    pass


def test_a_service_that_ends_between_two_answers_is_no_error() -> None:
    scripted = Scripted([state(Phase.DRAINING, 1), gone()])
    last = drain_service(scripted, 10.0, ignore, now_s=time.monotonic)
    assert last == state(Phase.DRAINING, 1)


def test_asking_again_never_lets_it_last_longer() -> None:
    scripted = Scripted([state(Phase.DRAINING, 1), state(Phase.DRAINING, 1), state(Phase.DRAINED)])
    now = iter(range(1000))
    drain_service(scripted, 50.0, ignore, now_s=lambda: float(next(now)))
    ends = [request.within_s for request in scripted.asked]
    assert ends[0] == 50.0
    assert ends == sorted(ends, reverse=True)


def test_a_service_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_drain, "GONE_S", 0.2)
    scripted = Scripted([state(Phase.DRAINED)], lingers=True)
    with pytest.raises(ServiceError, match="drained and still answers"):
        drain_service(scripted, 1.0, ignore, now_s=time.monotonic)


@pytest.mark.parametrize("command", ["status", "drain", "reload"])
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("lisen: unix:///x\n", "lisen: unknown key; did you mean listen?"),
        ("log: {level: info}\nlog: {level: debug}\n", "log: stands twice in the file"),
    ],
)
def test_which_service_is_meant_is_not_guessed_from_a_file_with_mistakes(
    tmp_path: Path, command: str, more: str, told: str
) -> None:
    refused = run("service", command, "--config", str(small_config(tmp_path, more)))
    assert refused.exit_code == 1
    assert told in refused.stderr
