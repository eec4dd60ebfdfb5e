"""Drives are added to, taken from, and lost by a pool while it is exported: what hosts reach, and what the target must
have confirmed before a drive is anybody else's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.errors import ConfigError, PoolBusyError, ServiceUnavailableError
from tests.dpu.export.drives_rig import DrivesRig
from tests.dpu.export.fake_nvmet import os_error
from tests.dpu.export.keeper_cases import DEADLINE_S, until
from tests.dpu.pool_cases import key
from tests.dpu.running_drives.cases import is_in


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[DrivesRig]:
    rig = DrivesRig(tmp_path)
    yield rig
    rig.pool.close()


def no_drive_is_stuck(drives: DrivesRig) -> None:
    """All that are the pool's are shown."""
    until(lambda: not drives.pool._drives.showing.now().outgoing)


# ---- one that comes --------------------------------------------------------------------------------------------------


def test_a_drive_that_is_added_is_a_namespace_of_each_host(drives: DrivesRig, tmp_path: Path) -> None:
    one, two = drives.attach("one"), drives.attach("two")
    assert drives.add(tmp_path / "three") == 3
    for attachment in (one, two):
        drives.shows(attachment, 1, 2, 3, 4)
        assert drives.exported(attachment)[4] == str((tmp_path / "three").resolve())
    drives.pool.close()
    drives.open()
    assert drives.exported(drives.attach("three")).keys() == {1, 2, 3, 4}


def test_a_host_gets_no_place_on_a_drive_before_it_says_that_it_reaches_it(drives: DrivesRig, tmp_path: Path) -> None:
    before = drives.attach("one")
    assert drives.drives_granted(before, 0) == {0, 1, 2}
    drives.add(tmp_path / "three")
    drives.shows(before, 1, 2, 3, 4)
    assert drives.heartbeat(before).drives_version > before.drives_version
    assert drives.drives_granted(before, 20) <= {0, 1, 2}, "it has not asked"
    told = drives.attach("one")
    assert [namespace.nsid for namespace in told.namespaces] == [1, 2, 3, 4]
    assert told.export == before.export
    assert drives.drives_granted(before, 40) <= {0, 1, 2}, "it has asked, and its workers have yet to open it"
    drives.says(told, 1, 2, 3, 4)
    assert 3 in drives.drives_granted(told, 60, 24)
    assert drives.heartbeat(told).drives_version == told.drives_version


def test_what_lies_on_a_drive_is_a_miss_for_a_host_that_does_not_reach_it(drives: DrivesRig, tmp_path: Path) -> None:
    """Also for one of an earlier version, which never asks."""
    old, new = drives.attach("old"), drives.attach("new")
    drives.add(tmp_path / "three")
    drives.shows(new, 1, 2, 3, 4)
    new = drives.attach("new")
    drives.says(new, 4)
    places = {chunk: drives.store(new, chunk) for chunk in range(3)}
    assert set(places.values()) == {3}, "the only one that it has proven"
    assert [drives.finds(new, chunk) for chunk in places] == [True] * 3
    assert [drives.finds(old, chunk) for chunk in places] == [False] * 3
    drives.says(new, 1, 2, 3)
    assert [drives.finds(new, chunk) for chunk in places] == [False] * 3, "one of its workers has lost it"
    assert drives.drives_granted(new, 20) == {0, 1, 2}


def test_a_report_from_before_a_change_says_nothing_of_what_has_come_since(drives: DrivesRig, tmp_path: Path) -> None:
    before = drives.attach("one")
    drives.add(tmp_path / "three")
    drives.shows(before, 1, 2, 3, 4)
    drives.says(before, 1, 2, 3, 4)
    assert drives.drives_granted(before, 0, 24) <= {0, 1, 2}


def test_a_host_is_told_of_a_drive_when_the_target_shows_it_and_keeps_what_it_has_until_then(
    drives: DrivesRig, tmp_path: Path
) -> None:
    one = drives.attach("one")

    def refuse(change: str) -> None:
        if "namespaces/4" in change:
            raise os_error(5)

    drives.kernel.fault = refuse
    drives.add(tmp_path / "three")
    until(lambda: "namespaces/4" in drives.status().exports_problem)
    with pytest.raises(ServiceUnavailableError, match="not exported to this host"):
        drives.attach("one", deadline_s=0.5)
    assert drives.states() == {"one": "live"}
    assert drives.drives_granted(one, 0) == {0, 1, 2}
    drives.kernel.fault = lambda change: None
    until(lambda: drives.status().exports_problem == "")
    assert [namespace.nsid for namespace in drives.attach("one").namespaces] == [1, 2, 3, 4]


# ---- one that is taken -----------------------------------------------------------------------------------------------


def test_a_drive_is_removed_when_no_host_reaches_it_any_more(drives: DrivesRig) -> None:
    one, two = drives.attach("one"), drives.attach("two")
    for attachment in (one, two):
        drives.connect(attachment)
    device = drives.devices[2]
    assert device in drives.reached()
    drives.remove(1)
    assert device not in drives.reached()
    assert drives.numbers() == [0, 2]
    assert drives.exported(one) == drives.exported(two) == {nsid: drives.devices[nsid] for nsid in (1, 3)}
    assert drives.drives_granted(one, 0) == {0, 2}
    drives.pool.close()
    drives.open()
    assert drives.exported(drives.attach("three")).keys() == {1, 3}


def test_a_drive_that_the_target_is_still_at_is_not_removed(drives: DrivesRig) -> None:
    """A request of any host that is in flight there may be done when another pool has the drive."""
    one, two = drives.attach("one"), drives.attach("two")
    for attachment in (one, two):
        drives.connect(attachment)
    assert two.export is not None
    writing = drives.kernel.hold[two.export.subsystem_nqn, "2"] = threading.Event()
    with pytest.raises(PoolBusyError, match=r"not confirmed that no host reaches drive 1 .*kernel has been at it"):
        drives.remove(1, deadline_s=1.0)
    assert drives.numbers() == [0, 1, 2]
    assert (drives.path / "data.1").exists()
    writing.set()
    for attachment in (one, two):
        drives.shows(attachment, 1, 2, 3)
    no_drive_is_stuck(drives)
    told = drives.attach("one")
    drives.says(told, 1, 2, 3)
    assert drives.drives_granted(told, 0) == {0, 1, 2}, "as if nothing had been"
    drives.remove(1)
    assert drives.numbers() == [0, 2]


def test_removal_waits_for_requests_in_flight(drives: DrivesRig) -> None:
    one = drives.attach("one")
    drives.connect(one)
    assert one.export is not None
    writing = drives.kernel.hold[one.export.subsystem_nqn, "2"] = threading.Event()
    removing = threading.Thread(target=drives.remove, args=(1,))
    removing.start()
    until(lambda: drives.is_disabled(one, 2))
    time.sleep(0.3)
    assert removing.is_alive()
    assert 1 in drives.numbers()
    writing.set()
    removing.join(DEADLINE_S)
    assert drives.numbers() == [0, 2]


def test_a_drive_is_not_removed_while_its_target_does_not_answer(drives: DrivesRig) -> None:
    one = drives.attach("one")

    def fail(path: str) -> None:
        raise RuntimeError("no answer")

    drives.kernel.look = fail
    with pytest.raises(PoolBusyError, match="the target has not confirmed"):
        drives.remove(1, deadline_s=0.5)
    drives.kernel.look = lambda path: None
    assert drives.numbers() == [0, 1, 2]
    drives.shows(one, 1, 2, 3)
    no_drive_is_stuck(drives)


def test_a_drive_that_others_show_is_not_removed(drives: DrivesRig) -> None:
    """By hand, say: whoever did it, its host may write there."""
    folder = "subsystems/nqn.2026-11.x:by-hand"
    drives.kernel.make(folder)
    drives.kernel.make(f"{folder}/namespaces/7")
    for attribute, value in {"device_path": drives.devices[2], "enable": "1"}.items():
        drives.kernel.write(f"{folder}/namespaces/7/{attribute}", value)
    with pytest.raises(PoolBusyError, match="by-hand still shows it as namespace 7"):
        drives.remove(1, deadline_s=0.5)
    drives.kernel.write(f"{folder}/namespaces/7/enable", "0")
    with pytest.raises(PoolBusyError, match="by-hand still has it behind a namespace"):
        drives.remove(1, deadline_s=0.5)  # it may be waiting for requests in flight just so
    drives.kernel.remove(f"{folder}/namespaces/7")
    drives.remove(1)


def test_a_drive_is_used_while_somebody_reads_it_and_shown_until_then(drives: DrivesRig) -> None:
    one = drives.attach("one")
    places = {chunk: drives.store(one, chunk) for chunk in range(6)}
    chunk = next(chunk for chunk, number in places.items() if number == 1)
    group = api.GroupKeys(0, (b"",) * chunk + (key(chunk),), (*range(1, chunk + 1), chunk))
    reply = drives.pool.match(api.MatchRequest("one", "r", 16, (group,)), deadline_s=DEADLINE_S)
    assert reply.lease_id
    with pytest.raises(PoolBusyError, match="engines still read from drive 1"):
        drives.remove(1, deadline_s=0.3)
    assert drives.exported(one).keys() == {1, 2, 3}
    drives.pool.release(api.ReleaseRequest("one", (reply.lease_id,)), deadline_s=DEADLINE_S)
    assert drives.remove(1) == list(places.values()).count(1)


def test_a_target_that_lost_everything_meanwhile_does_not_get_the_drive_again(drives: DrivesRig) -> None:
    one = drives.attach("one")
    drives.remove(1)
    drives.kernel.reboot()
    drives.shows(one, 1, 3)


def test_a_pool_that_was_exported_and_is_not_any_more_keeps_its_drives(tmp_path: Path) -> None:
    drives = DrivesRig(tmp_path)
    drives.pool.close()
    with Pool.open(drives.path) as drives.pool:
        with pytest.raises(ConfigError, match=r"was exported \(nvmet, .* served without these exports") as refused:
            drives.remove(1)
        assert drives.numbers() == [0, 1, 2]
    assert "--config" in refused.value.next_step


# ---- one that is lost ------------------------------------------------------------------------------------------------


def test_a_drive_that_is_gone_is_shown_to_nobody_until_it_is_back(drives: DrivesRig) -> None:
    """What the target has open is the drive as it was: behind that, what comes back is not to be found."""
    one = drives.attach("one")
    places = {chunk: drives.store(one, chunk) for chunk in range(6)}
    file = drives.path / "data.1"
    file.rename(drives.path / "elsewhere")
    until(is_in(drives.pool, 1, "gone"))
    drives.shows(one, 1, 3)
    assert {chunk for chunk in places if drives.finds(one, chunk)} == {c for c, number in places.items() if number != 1}
    (drives.path / "elsewhere").rename(file)
    until(is_in(drives.pool, 1, "online"))
    drives.shows(one, 1, 2, 3)
    assert not any(drives.finds(one, chunk) for chunk, number in places.items() if number == 1), "not proven anew"
    told = drives.attach("one")
    drives.says(told, 1, 2, 3)
    assert all(drives.finds(told, chunk) for chunk in places)


def test_a_drive_that_is_back_is_shown_only_when_the_target_has_let_go_of_it(drives: DrivesRig) -> None:
    one = drives.attach("one")
    drives.connect(one)
    assert one.export is not None
    writing = drives.kernel.hold[one.export.subsystem_nqn, "2"] = threading.Event()
    file = drives.path / "data.1"
    file.rename(drives.path / "elsewhere")
    until(is_in(drives.pool, 1, "gone"))
    until(lambda: drives.is_disabled(one, 2))
    (drives.path / "elsewhere").rename(file)
    until(is_in(drives.pool, 1, "online"))
    time.sleep(0.3)
    assert not drives.pool._drives.showing.is_shown(1)
    writing.set()
    drives.shows(one, 1, 2, 3)
    no_drive_is_stuck(drives)


def test_a_drive_that_is_gone_can_be_removed(drives: DrivesRig) -> None:
    one = drives.attach("one")
    (drives.path / "data.1").unlink()
    until(is_in(drives.pool, 1, "gone"))
    drives.remove(1)
    assert (drives.numbers(), sorted(drives.exported(one))) == ([0, 2], [1, 3])


# ---- the service ends ------------------------------------------------------------------------------------------------


def test_a_service_that_ends_while_a_drive_is_taken_out_has_it_again(
    drives: DrivesRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not reported as removed."""
    monkeypatch.setattr(ExportKeeper.close, "__kwdefaults__", {"deadline_s": 0.3})
    one = drives.attach("one")
    drives.connect(one)
    assert one.export is not None
    writing = drives.kernel.hold[one.export.subsystem_nqn, "2"] = threading.Event()
    failed: list[Exception] = []

    def remove() -> None:
        try:
            drives.remove(1, deadline_s=60.0)
        except PoolBusyError as error:
            failed.append(error)

    removing = threading.Thread(target=remove)
    removing.start()
    until(lambda: drives.is_disabled(one, 2))
    closing = threading.Thread(target=drives.pool.close)
    closing.start()
    removing.join(DEADLINE_S)
    assert len(failed) == 1
    writing.set()
    closing.join(DEADLINE_S)
    drives.open()
    assert drives.numbers() == [0, 1, 2]
    assert drives.exported(drives.attach("two")).keys() == {1, 2, 3}
