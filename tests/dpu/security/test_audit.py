"""The audit log: nothing of administration happens that it does not tell of."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.access.audit_log import REFUSALS_PER_MINUTE, AuditLog, arguments_of
from meshfusion.dpu.api.drive_types import RemoveDriveRequest
from meshfusion.dpu.api.security.guard import Caller
from meshfusion.dpu.api.security.principal import LOCAL
from meshfusion.dpu.api.security.roles import RULES
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError, ServiceError
from tests.dpu.security.test_guard import DEADLINE_S, Rig
from tests.dpu.telemetry.fakes import Clock
from tests.host.support.waiting import until

CALLER = Caller(LOCAL, "unix:", "DriveAdmin.RemoveDrive", RULES["DriveAdmin.RemoveDrive"])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_a_call_leaves_what_it_was_and_how_it_ended(rig: Rig) -> None:
    rig.admin_client("operator").remove_drive(RemoveDriveRequest(0), deadline_s=DEADLINE_S)
    begun, ended = rig.records()
    assert stat.S_IMODE(rig.audit_path.stat().st_mode) == 0o600
    assert begun["call"] == ended["call"]
    assert begun["time"] <= ended["time"]
    assert begun["time"].endswith("Z")
    assert begun["arguments"] == {"number": 0, "pool": ""}
    assert (begun["outcome"], ended["outcome"]) == ("begun", "ok")
    assert ended["duration_ms"] >= 0
    for record in (begun, ended):
        assert (record["principal"], record["rpc"]) == ("token:operator", "DriveAdmin.RemoveDrive")
        assert record["peer"].startswith("ipv4:127.0.0.1:")


def test_it_tells_which_of_several_pools_was_meant(rig: Rig) -> None:
    with pytest.raises(ServiceError, match="no pool 'red'"):  # the rig has one, without a name
        rig.admin_client("operator", pool="red").remove_drive(RemoveDriveRequest(2), deadline_s=DEADLINE_S)
    begun, ended = rig.records()
    assert begun["arguments"] == {"number": 2, "pool": "red"}
    assert ended["outcome"] == "ServiceError"


def test_errors_are_outcomes(rig: Rig) -> None:
    client = rig.admin_client("operator")
    for failure, outcome in (
        (ConfigError("no", next_step="No."), "ConfigError"),
        (ZeroDivisionError(), "InternalError"),
    ):
        rig.admin.failure = failure
        with pytest.raises((ConfigError, ServiceError)):
            client.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
        assert rig.records()[-1]["outcome"] == outcome


def test_lookups_leave_nothing(rig: Rig) -> None:
    rig.client("reader").status(deadline_s=DEADLINE_S)
    assert not rig.audit_path.exists()


def test_what_cannot_be_recorded_is_not_done_and_lookups_go_on(rig: Rig) -> None:
    client = rig.admin_client("operator")
    rig.audit_path.mkdir()
    with pytest.raises(MediaError, match=r"cannot be written .*; nothing was done") as caught:
        client.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
    assert "audit.path" in caught.value.next_step
    assert rig.admin.removed == []
    rig.client("reader").status(deadline_s=DEADLINE_S)
    rig.audit_path.rmdir()
    assert client.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S) == 3
    assert [record["outcome"] for record in rig.records()] == ["begun", "ok"]


def test_a_full_disk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a record is taken back; and one that could not end says that it was begun, to the caller too."""
    client = rig.admin_client("operator")
    client.remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
    before = rig.audit_path.read_bytes()
    write, room = os.write, [0]

    def full(descriptor: int, data: bytes) -> int:
        if room[0] > 0:
            room[0] -= 1
            return write(descriptor, data)
        write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("meshfusion.dpu.access.audit_log.os.write", full)
    with pytest.raises(MediaError, match="No space left on device"):
        client.remove_drive(RemoveDriveRequest(2), deadline_s=DEADLINE_S)
    assert rig.audit_path.read_bytes() == before
    assert rig.admin.removed == [1]
    room[0] = 1
    with pytest.raises(MediaError, match=r"RemoveDrive was made before, and ended with: ok"):
        client.remove_drive(RemoveDriveRequest(3), deadline_s=DEADLINE_S)
    assert rig.admin.removed == [1, 3]
    assert rig.records()[-1]["outcome"] == "begun"
    monkeypatch.undo()
    client.remove_drive(RemoveDriveRequest(4), deadline_s=DEADLINE_S)
    assert [r["arguments"]["number"] for r in rig.records() if r["outcome"] == "begun"] == [1, 3, 4]


def test_a_disk_that_hangs_keeps_no_lookup_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls of administration come meanwhile, here more than the service has threads: all are refused in
    time. The one whose record lands on the disk after that is not made then, and the log says so."""
    may_go, fsync = threading.Event(), os.fsync
    asked: list[int] = []

    def hang(descriptor: int) -> None:
        asked.append(descriptor)
        assert may_go.wait(60)
        fsync(descriptor)

    client = rig.admin_client("operator")

    def call() -> None:
        with contextlib.suppress(MeshFusionError):
            client.remove_drive(RemoveDriveRequest(1), deadline_s=60)

    monkeypatch.setattr("meshfusion.dpu.access.audit_log.DEADLINE_S", 0.2)
    monkeypatch.setattr("meshfusion.dpu.access.audit_log.os.fsync", hang)
    callers = [threading.Thread(target=call) for _ in range(48)]
    for caller in callers:
        caller.start()
    try:
        until(lambda: not any(caller.is_alive() for caller in callers), limit_s=20.0)
        rig.client("reader").status(deadline_s=DEADLINE_S)
        with pytest.raises(MediaError, match=r"cannot be written .*; nothing was done"):
            rig.admin_client("operator").remove_drive(RemoveDriveRequest(1), deadline_s=DEADLINE_S)
        assert len(asked) == 1
        assert rig.admin.removed == []
    finally:
        may_go.set()
    for caller in callers:
        caller.join(20.0)
    monkeypatch.undo()
    assert rig.admin_client("operator").remove_drive(RemoveDriveRequest(2), deadline_s=DEADLINE_S) == 3
    assert rig.admin.removed == [2]
    late, not_made, begun, ended = rig.records()
    assert late["call"] == not_made["call"] != begun["call"] == ended["call"]
    assert (late["outcome"], not_made["outcome"]) == ("begun", "not made")
    assert (begun["arguments"]["number"], ended["outcome"]) == (2, "ok")


def test_a_disk_that_hangs_keeps_no_service_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_go, real_open = threading.Event(), os.open

    def hang(*arguments: Any) -> int:
        assert may_go.wait(60)
        return real_open(*arguments)

    monkeypatch.setattr("meshfusion.dpu.access.audit_log.DEADLINE_S", 0.1)
    monkeypatch.setattr("meshfusion.dpu.access.audit_log.os.open", hang)
    log = AuditLog(tmp_path / "a")
    try:
        log.probe()
        assert "its disk does not answer): administration is refused" in caplog.text
        with pytest.raises(MediaError, match=r"its disk does not answer\); nothing was done"):
            log.begin(CALLER, None)
        log.close()  # nor from its end
    finally:
        may_go.set()


def test_refusals_of_one_caller_are_bounded_and_counted(tmp_path: Path) -> None:
    clock = Clock(0.0)
    log = AuditLog(tmp_path / "a", clock=clock)
    for _ in range(REFUSALS_PER_MINUTE + 7):
        log.refuse(CALLER, "PermissionDeniedError")
    clock.now_s = 61.0
    log.refuse(CALLER, "PermissionDeniedError")
    records = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert len(records) == REFUSALS_PER_MINUTE + 1
    assert [record.get("not_recorded") for record in records] == [None] * REFUSALS_PER_MINUTE + [7]
    log.close()


def test_it_is_durable_before_the_call_and_before_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, synced = AuditLog(tmp_path / "a"), list[int]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr("meshfusion.dpu.access.audit_log.os.fsync", noted)
    entry = log.begin(CALLER, pb.RemoveDriveRequest(number=1))
    size = (tmp_path / "a").stat().st_size
    assert synced[-1] == size
    log.end(entry, CALLER, "ok", 0.001)
    assert synced[-1] == (tmp_path / "a").stat().st_size > size
    log.close()


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    log = AuditLog(path, wall_s=lambda: 1_800_000_000.25)
    log.end(log.begin(CALLER, None), CALLER, "ok", 0.0)
    path.rename(tmp_path / "a.1")
    log.end(log.begin(CALLER, None), CALLER, "ok", 0.0)
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("a", "a.1")] == [2, 2]
    assert json.loads(path.read_text().splitlines()[0])["time"] == "2027-01-15T08:00:00.250Z"
    log.close()


def test_it_goes_on_after_half_a_line_and_closes_what_was_open(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"half')
    path.chmod(0o644)
    log = AuditLog(path)
    log.begin(CALLER, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    half, whole = path.read_text().splitlines()
    assert half == '{"half'
    assert json.loads(whole)["outcome"] == "begun"
    log.close()


def test_it_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        log = AuditLog(tmp_path / name)
        log.probe()  # only told
        with pytest.raises(MediaError):
            log.begin(CALLER, None)
    assert (tmp_path / "victim").read_text() == ""


def test_arguments_are_bounded_and_without_secrets() -> None:
    shown: dict[str, Any] = arguments_of(pb.AttachRequest(handoff_token="hush", host="h" * 5_000, identity=b"\x01"))
    assert shown["handoff_token"] == "(secret)"
    assert len(shown["host"]) == 1_003
    assert shown["identity"] == "01"
    secrets = {"token", "key", "secret", "password"}
    for name, rule in RULES.items():
        if rule.is_audited:
            service, _, method = name.partition(".")
            fields = pb.DESCRIPTOR.services_by_name[service].methods_by_name[method].input_type.fields
            assert not [f.name for f in fields if any(word in f.name for word in secrets)], "look at _SECRETS"


def test_bytes_that_move_a_cursor_stay_text(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "a")
    log.begin(CALLER, pb.AddDriveRequest(data_path='/x\n{"outcome": "ok"}\x1b[2J'))
    (line,) = (tmp_path / "a").read_text().splitlines()
    assert "\x1b" not in line
    assert json.loads(line)["arguments"]["data_path"].startswith("/x\n")
    log.close()
