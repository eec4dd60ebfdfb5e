"""How an engine stands with the service: identities, incarnations, liveness files, closing."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import create_liveness, hold_liveness, take_liveness_away
from meshfusion.host import pool_client
from meshfusion.host.pool_events import (
    NOTHING_STORED,
    Attached,
    ReserveFailed,
)
from meshfusion.jbof.errors import MediaError, MeshFusionError, PermissionDeniedError, UnauthenticatedError
from meshfusion.jbof.nvme.auth_keys import Secret, format_secret, key_id
from tests.host.support.controlled_service import ControlledService, refusal, unavailable
from tests.host.support.pool_client_rig import (
    OTHER_IDENTITY,
    UNITS,
    attached,
    grant,
    granted,
    keys,
    make_client,
    reserve,
    wish,
)
from tests.host.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick_reattach")


# ---- identities and incarnations -----------------------------------------------------------------------------------


def test_another_identity_is_another_incarnation(service: ControlledService) -> None:
    with attached(service) as rig:
        lease_id = rig.match(keys(2)).lease_id
        rig.client.release((lease_id,))  # as the scheduler's reset does, just before
        rig.client.attach_as(OTHER_IDENTITY)
        assert rig.match(keys(2), attempt=2).stored == NOTHING_STORED
        again = rig.expect(Attached).attachment
        assert service.holders[again.holder_id].identity == OTHER_IDENTITY
        until(lambda: not service.leases, what="for a lease to be released by the holder that got it")
        assert rig.match(keys(2), attempt=3).stored == NOTHING_STORED  # these chunks are of the former identity
        refused, answered = reserve(rig, wish(1), wish(2, identity=OTHER_IDENTITY))
        assert refused == ReserveFailed(1)
        assert granted(answered).identity == OTHER_IDENTITY


@pytest.mark.parametrize("kind", [UnauthenticatedError, PermissionDeniedError])
def test_an_engine_that_the_service_knows_by_another_name_attaches_anew(
    service: ControlledService, kind: type[MeshFusionError]
) -> None:
    """Its certificate, or the service's configuration, was changed: what it attached before is not its own any more."""
    with attached(service) as rig:
        service.fails["match"] = kind("not yours", next_step="Attach again.")
        assert rig.match(keys(2)).stored == NOTHING_STORED
        again = rig.expect(Attached).attachment
        assert again.holder_id in service.holders
        assert len(service.calls["attach"]) == 2


CHAP = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:"
OTHER_CHAP = format_secret(Secret(bytes(32)))


def test_a_new_key_takes_the_place_of_the_former_and_nothing_else_changes(tmp_path: Path) -> None:
    service = ControlledService(tmp_path, heartbeat_s=0.02)
    service.export = api.Export("nqn.x:s", "nqn.x:h", (), CHAP)
    with attached(service) as rig:
        first = rig.attachment
        until(lambda: len(service.calls["heartbeat"]) >= 2)
        assert {request.host_key_id for request in service.calls["heartbeat"]} == {key_id(CHAP)}
        service.new_key = OTHER_CHAP
        until(lambda: rig.client.attachment is not None and rig.client.attachment != first)
        assert rig.client.attachment == replace(first, export=replace(service.export, host_key=OTHER_CHAP))
        until(lambda: service.calls["heartbeat"][-1].host_key_id == key_id(OTHER_CHAP), what="for it to be told")
        assert len(service.calls["attach"]) == 1


def test_a_new_key_is_confirmed_at_once(tmp_path: Path) -> None:
    """Whoever asked for it waits for that."""
    service = ControlledService(tmp_path, heartbeat_s=1.0)
    service.export = api.Export("nqn.x:s", "nqn.x:h", (), CHAP)
    service.new_key = OTHER_CHAP
    with attached(service):
        until(lambda: len(service.calls["heartbeat"]) >= 1)
        begun_s = time.monotonic()
        until(lambda: len(service.calls["heartbeat"]) >= 2)
        assert time.monotonic() - begun_s < 0.5
        said = [request.host_key_id for request in service.calls["heartbeat"]]
        assert said == [key_id(CHAP), key_id(OTHER_CHAP)], "once, though the service says it again"


def test_what_is_no_key_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = ControlledService(tmp_path, heartbeat_s=0.02)
    service.export = api.Export("nqn.x:s", "nqn.x:h", (), CHAP)
    with attached(service) as rig:
        service.new_key = CHAP[:-9]
        before = len(service.calls["heartbeat"])
        until(lambda: len(service.calls["heartbeat"]) >= before + 3)
        assert rig.client.attachment == rig.attachment
    assert "a new key that is none" in caplog.text
    assert CHAP[10:30] not in caplog.text


def test_with_local_access_there_is_no_key(tmp_path: Path) -> None:
    service = ControlledService(tmp_path, heartbeat_s=0.02)
    service.new_key = CHAP
    with attached(service) as rig:
        until(lambda: len(service.calls["heartbeat"]) >= 3)
        assert rig.client.attachment == rig.attachment
    assert {request.host_key_id for request in service.calls["heartbeat"]} == {""}


def test_an_attachment_that_comes_after_the_identity_changed_is_given_back(service: ControlledService) -> None:
    with attached(service) as rig:
        service.holds["attach"] = threading.Event()
        rig.client.attach_as(OTHER_IDENTITY)
        until(lambda: len(service.calls["attach"]) == 2)
        third = b"\x33" * 32
        rig.client.attach_as(third)
        service.holds["attach"].set()
        again = rig.expect(Attached).attachment
        assert service.holders[again.holder_id].identity == third
        given_back = service.calls["attach"][1].incarnation
        assert given_back not in service.holders
        assert take_liveness_away(service.directory / f"{given_back}.alive")


def test_an_earlier_incarnation_can_be_fenced_once_workers_have_left_it(service: ControlledService) -> None:
    with attached(service) as rig:
        former = Path(rig.attachment.liveness_path)
        worker = hold_liveness(former)
        service.restart()
        rig.match(keys(1))
        current = rig.expect(Attached).attachment
        assert not take_liveness_away(former), "its worker may still write"
        assert not take_liveness_away(Path(current.liveness_path))
        os.close(worker)
        assert take_liveness_away(former)


def test_a_liveness_file_out_of_reach_at_start_is_an_error_and_leaves_nothing(service: ControlledService) -> None:
    client = make_client(service)
    service.directory = service.directory / "elsewhere"
    service.directory.mkdir()
    real_attach = service.attach

    def attach_far_away(request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        return replace(real_attach(request, deadline_s=deadline_s), liveness_path="/nowhere/x.alive")

    service.attach = attach_far_away  # type: ignore[method-assign]
    with pytest.raises(MediaError):
        client.start()
    assert not service.holders
    client.close()  # the engine shuts a half-started connector down
    assert service.is_closed


@pytest.mark.parametrize("error", [unavailable(), refusal(), RuntimeError("a bug")])
def test_trouble_at_start_is_the_engines_to_hear(service: ControlledService, error: Exception) -> None:
    service.fails["attach"] = error
    client = make_client(service)
    with pytest.raises(type(error)):
        client.start()
    client.close()


def test_a_bug_while_attaching_again_does_not_end_the_attempts(service: ControlledService) -> None:
    with attached(service) as rig:
        service.fails["attach"] = RuntimeError("a bug")
        service.restart()
        rig.match(keys(1))
        until(lambda: len(service.calls["attach"]) > 3)
        service.fails.clear()
        rig.expect(Attached)


def test_closing_detaches_and_frees_the_liveness_lock(service: ControlledService) -> None:
    with attached(service) as rig:
        rig.client.close()
        assert not service.holders
        assert service.is_closed
        assert take_liveness_away(Path(rig.attachment.liveness_path))
        assert not [t for t in threading.enumerate() if t.name.startswith("meshfusion-") and t in rig.client._threads]
        service.calls["detach"].clear()
    assert service.calls["detach"] == []  # closed again by the fixture: nothing left to do


@pytest.mark.parametrize("patience_s", [2.0, 0.01])
def test_closing_while_an_attachment_is_being_made(
    service: ControlledService, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(pool_client, "CLOSE_DEADLINE_S", patience_s)
    with attached(service) as rig:
        service.holds["attach"] = threading.Event()
        service.restart()
        rig.match(keys(1))
        until(lambda: len(service.calls["attach"]) == 2)
        timer = threading.Timer(0.1, service.holds["attach"].set)
        timer.start()
        rig.client.close()
        timer.join()
        late = service.calls["attach"][1].incarnation
        until(lambda: late in service.former, what="for the late attachment to be given back")
        assert take_liveness_away(service.directory / f"{late}.alive")


def test_queued_commits_are_carried_out_before_closing(service: ControlledService) -> None:
    with attached(service) as rig:
        for i in range(20):
            service.grants[f"g{i}"] = rig.attachment.holder_id
            rig.client.settle(grant(rig.attachment.holder_id, f"g{i}"), ((UNITS,),))
        rig.client.close()
        assert not service.grants


# ---- liveness files ------------------------------------------------------------------------------------------------


def test_liveness_of_two_processes_of_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "h.alive"
    create_liveness(path)
    first, second = hold_liveness(path), hold_liveness(path)
    assert not take_liveness_away(path)
    os.close(first)
    assert not take_liveness_away(path)
    os.close(second)
    assert take_liveness_away(path)
    assert take_liveness_away(path)  # gone is gone
    with pytest.raises(MediaError, match="fenced"):
        hold_liveness(path)


def test_liveness_out_of_reach_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MediaError, match="out of reach"):
        hold_liveness(tmp_path / "file" / "h.alive")


# ---- drives of a target ----------------------------------------------------------------------------------------------

EXPORT = api.Export("nqn.2026-11.x:s", "nqn.2026-11.x:h", (api.Portal("rdma", "10.0.0.1", 4420),))


class ExportingService(ControlledService):
    """``version``: of its drives, of which there is one more than that. ``shows``: does its target show them yet?"""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, heartbeat_s=0.02)
        self.version = 0
        self.shows = True

    def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
        if request.incarnation in self.holders:
            self.calls["asked"].append(request)
            if not self.shows:
                raise unavailable()
        else:
            made = super().attach(request, deadline_s=deadline_s)
            self.first = replace(made, liveness_path="", export=EXPORT)
        namespaces = tuple(api.Namespace(nsid, "", 4096, 1 << 20) for nsid in range(1, self.version + 2))
        return replace(self.first, namespaces=namespaces, drives_version=self.version)

    def heartbeat(self, request: api.HeartbeatRequest, *, deadline_s: float) -> api.HeartbeatReply:
        reply = super().heartbeat(request, deadline_s=deadline_s)
        return replace(reply, drives_version=self.version)

    @property
    def last_reached(self) -> api.Reached | None:
        beats = self.calls["heartbeat"]
        return beats[-1].reached if beats else None


def test_a_host_of_a_target_asks_for_drives_that_have_come_and_says_which_it_reaches(tmp_path: Path) -> None:
    service = ExportingService(tmp_path)
    with attached(service) as rig:
        holder_id = rig.attachment.holder_id
        until(lambda: len(service.calls["heartbeat"]) > 1)
        assert (service.last_reached, service.calls["asked"]) == (None, [])
        service.version = 1
        until(lambda: len(rig.client.attachment.namespaces) == 2 if rig.client.attachment else False)
        assert rig.client.attachment is not None
        assert (rig.client.attachment.holder_id, rig.client.attachment.drives_version) == (holder_id, 1)
        rig.client.set_reached(holder_id, api.Reached(1, (1, 2)))
        until(lambda: service.last_reached == api.Reached(1, (1, 2)))
        rig.client.set_reached("another", api.Reached(1, (1,)))
        until(lambda: service.last_reached is None, what="for what another reaches not to be told as ours")


def test_a_target_that_does_not_show_a_drive_yet_costs_nothing_but_time(tmp_path: Path) -> None:
    service = ExportingService(tmp_path)
    with attached(service) as rig:
        holder_id = rig.attachment.holder_id
        service.shows, service.version = False, 1
        until(lambda: len(service.calls["asked"]) > 2)
        assert rig.client.attachment is not None, "what it has, it keeps"
        assert (rig.client.attachment.holder_id, len(rig.client.attachment.namespaces)) == (holder_id, 1)
        service.shows = True
        until(lambda: len(rig.client.attachment.namespaces) == 2 if rig.client.attachment else False)
        assert len(service.calls["attach"]) == 1
