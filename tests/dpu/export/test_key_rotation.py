"""Keys of hosts that are replaced: when, in which order, and what each side knows of it."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.service_types import KeyChange
from meshfusion.dpu.export.key_disk import KeyDisk
from meshfusion.dpu.export.key_keeping import KeyKeeping
from meshfusion.dpu.export.key_rotation import RETRY_S, KeyRotation, ServedKey
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.errors import MediaError, ServiceError, UnsupportedError
from meshfusion.jbof.nvme.auth_keys import key_id, parse_secret
from tests.dpu.export.keeper_cases import DEADLINE_S, Rig, until
from tests.dpu.pool_cases import IDENTITY, make_pool

OLD, NEW = "0" * 16, "1" * 16
HAS_OLD, HAS_NEW = ServedKey(OLD), ServedKey(NEW)
LIFETIME_S = 1000.0


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_key_has_its_time_from_when_it_is_first_served() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    assert rotation.due(5.0, {"one": HAS_OLD}) == ()
    assert rotation.due(5.0 + LIFETIME_S - 1, {"one": HAS_OLD}) == ()
    assert rotation.due(5.0 + LIFETIME_S, {"one": HAS_OLD}) == ("one",)
    rotation.replaced(5.0 + LIFETIME_S, "one")
    rotation.heard("one", NEW)
    assert rotation.due(4.0 + 2 * LIFETIME_S, {"one": HAS_NEW}) == ()
    assert rotation.due(5.0 + 2 * LIFETIME_S, {"one": HAS_NEW}) == ("one",)


def test_a_host_that_says_nothing_of_its_key_keeps_it() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.ask("one")
    assert rotation.due(0.0, {"one": HAS_OLD}) == ()
    assert rotation.due(10 * LIFETIME_S, {"one": HAS_OLD}) == ()
    rotation.heard("one", OLD)
    assert rotation.due(10 * LIFETIME_S, {"one": HAS_OLD}) == ("one",), "it was asked for"


def test_a_host_that_has_not_learned_its_last_key_is_left_alone_by_the_clock_but_not_by_people() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    rotation.due(0.0, {"one": HAS_NEW})
    assert rotation.due(LIFETIME_S, {"one": HAS_NEW}) == ()
    rotation.ask("one")
    assert rotation.due(LIFETIME_S, {"one": HAS_NEW}) == ("one",)


def test_a_file_that_could_not_be_written_is_tried_again_later() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    rotation.due(0.0, {"one": HAS_OLD})
    rotation.failed(LIFETIME_S, "one")
    assert rotation.due(LIFETIME_S + RETRY_S - 1, {"one": HAS_OLD}) == ()
    assert rotation.due(LIFETIME_S + RETRY_S, {"one": HAS_OLD}) == ("one",)


def test_nothing_is_kept_of_who_is_not_served_any_more() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    rotation.ask("one")
    assert rotation.due(0.0, {}) == ()
    rotation.heard("one", OLD)
    assert rotation.due(1.0, {"one": HAS_OLD}) == ()
    assert rotation.due(LIFETIME_S, {"one": HAS_OLD}) == ()
    assert rotation.due(LIFETIME_S + 1.0, {"one": HAS_OLD}) == ("one",)


def test_a_key_was_there_before_the_service_was() -> None:
    """A service that is restarted more often than keys are to be replaced replaces them all the same."""
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    assert rotation.due(0.0, {"one": ServedKey(OLD, age_s=LIFETIME_S - 10.0)}) == ()
    assert rotation.due(9.0, {"one": ServedKey(OLD, age_s=2 * LIFETIME_S)}) == (), "somebody set the clock"
    assert rotation.due(10.0, {"one": ServedKey(OLD, age_s=0.0)}) == ("one",)
    for age_s in (LIFETIME_S, 5 * LIFETIME_S):
        overdue = KeyRotation(LIFETIME_S)
        overdue.heard("one", OLD)
        assert overdue.due(0.0, {"one": ServedKey(OLD, age_s=age_s)}) == ("one",)


def test_a_key_that_its_target_does_not_ask_for_is_not_replaced() -> None:
    """Nobody has seen it yet; and so there are two at most."""
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    rotation.ask("one")
    assert rotation.due(0.0, {"one": ServedKey(OLD, is_there=False)}) == ()
    assert rotation.due(2 * LIFETIME_S, {"one": ServedKey(OLD, is_there=False)}) == ()
    assert rotation.is_asked("one")
    assert rotation.due(2 * LIFETIME_S, {"one": HAS_OLD}) == ("one",)


def test_what_was_asked_for_and_could_not_be_written_is_tried_again() -> None:
    rotation = KeyRotation()
    rotation.heard("one", OLD)
    rotation.ask("one")
    assert rotation.due(0.0, {"one": HAS_OLD}) == ("one",)
    rotation.failed(0.0, "one")
    assert rotation.is_asked("one")
    assert rotation.has_failed("one")
    assert rotation.due(RETRY_S - 1, {"one": HAS_OLD}) == ()
    assert rotation.due(RETRY_S, {"one": HAS_OLD}) == ("one",)
    rotation.replaced(RETRY_S, "one")
    assert not rotation.is_asked("one")
    assert not rotation.has_failed("one")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_key_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    keys = HostKeys(tmp_path)
    keys.make("one")
    former = keys.read("one")
    assert keys.wanted("one").id == key_id(former)
    before = os.umask(0)
    try:
        keys.replace("one")
    finally:
        os.umask(before)
    new = keys.read("one")
    assert parse_secret(new).key != parse_secret(former).key
    assert keys.wanted("one").id == key_id(new) != key_id(former)
    files = sorted(tmp_path.iterdir())
    assert [(path.name, path.stat().st_mode & 0o777) for path in files] == [("one.1.key", 0o600), ("one.key", 0o600)]
    assert keys.wanted("one").file == files[0]
    assert (keys.read("one", key_id(former)), keys.read("one", key_id(new))) == (former, new)
    assert HostKeys(tmp_path).wanted("one") == keys.wanted("one"), "also for the next owner"
    keys.is_there("one", key_id(former))
    assert len(list(tmp_path.iterdir())) == 2, "the target reads it when a host connects"
    keys.is_there("one", key_id(new))
    assert list(tmp_path.iterdir()) == [files[0]]
    assert keys.read("one", key_id(former)) == new, "what is gone was followed by the newest"


def test_keys_are_counted_on_and_all_go_with_their_incarnation(tmp_path: Path) -> None:
    keys = HostKeys(tmp_path)
    for name in ("one", "one-1", "two"):
        keys.make(name)
    others = {path.name for path in tmp_path.iterdir()} - {"one.key"}
    for number in range(1, 12):
        keys.replace("one")
        assert keys.wanted("one").file.name == f"one.{number}.key"
    keys.is_there("one", keys.wanted("one").id)
    for again in (keys, HostKeys(tmp_path)):
        again.replace("one")
    assert {path.name for path in tmp_path.iterdir()} - others == {"one.11.key", "one.12.key", "one.13.key"}
    keys.forget("one")
    assert {path.name for path in tmp_path.iterdir()} == others


def test_a_key_is_as_old_as_its_file(tmp_path: Path) -> None:
    keys = HostKeys(tmp_path)
    assert keys.age_s("one", 1000.0) == 0.0
    keys.make("one")
    os.utime(keys.path("one"), (1000.0, 1000.0))
    assert keys.age_s("one", 1060.0) == 60.0
    assert keys.age_s("one", 940.0) == 0.0
    keys.replace("one")
    assert keys.age_s("one", time.time()) < 60.0


def test_a_key_is_durable_before_its_incarnation_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a power failure finds it."""
    synced, true = set[str](), os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        true(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    HostKeys(tmp_path).make("one")
    assert synced == {str(tmp_path / ".one.key.new"), str(tmp_path)}


def test_one_that_is_gone_gets_no_key(tmp_path: Path) -> None:
    keys = HostKeys(tmp_path)
    keys.make("one")
    keys.forget("one")
    keys.replace("one")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keys = HostKeys(tmp_path)
    keys.make("one")
    former = keys.read("one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MediaError, match=r"key file .*one\.1\.key: No space left"):
            keys.replace("one")
    assert (keys.read("one"), keys.wanted("one").id) == (former, key_id(former))
    assert [path.name for path in tmp_path.iterdir()] == ["one.key"], "what was begun is a secret, too"
    (tmp_path / ".one.1.key.new").write_text(former)  # of a service that was killed
    (tmp_path / ".one.key.new").write_text(former)
    (tmp_path / "notes").touch()
    keys.forget_all_but(["one"])
    assert {path.name for path in tmp_path.iterdir()} == {"one.key", "notes"}


# ---- a pool, its target and its hosts --------------------------------------------------------------------------------


def newest(rig: Rig) -> str:
    """The key of holder one that is desired."""
    return HostKeys(rig.path / "holders").read("one")


class Engine:
    """A host of the pool's that takes new keys. ``key``: with which it would connect."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig, self.name = rig, name
        self.attachment = rig.attach(name)
        assert self.attachment.export is not None
        self.export = self.attachment.export
        self.key = self.export.host_key
        self.rig.connect(self.attachment)

    def heartbeat(self, *, is_old: bool = False) -> api.HeartbeatReply:
        known_id = "" if is_old else key_id(self.key)
        request = api.HeartbeatRequest(self.name, self.attachment.epoch, (), host_key_id=known_id)
        reply = self.rig.pool.heartbeat(request, deadline_s=DEADLINE_S)
        self.key = reply.host_key or self.key
        return reply

    @property
    def asked_for(self) -> str:
        """By the kernel."""
        return self.rig.kernel.hosts[self.export.host_nqn]

    @property
    def is_connected(self) -> bool:
        return (self.export.subsystem_nqn, self.export.host_nqn) in self.rig.kernel.connected


def test_a_new_key_reaches_target_and_host_and_no_connection_ends(rig: Rig) -> None:
    one, two = Engine(rig, "one"), Engine(rig, "two")
    former, other = one.key, two.key
    assert one.heartbeat().host_key == ""
    two.heartbeat()
    assert rig.pool.replace_keys("one", deadline_s=0.5) == {"one": KeyChange.HOST_LACKS_IT}
    assert one.asked_for != former
    assert one.key == former
    one.heartbeat()
    assert one.key == one.asked_for != former
    assert "DHHC" not in repr(one.heartbeat())
    assert (two.key, two.asked_for) == (other, other)
    assert one.is_connected
    assert two.is_connected
    assert newest(rig) == one.key
    assert one.heartbeat().host_key == "", "it knows"


def test_all_hosts_get_a_new_key_and_it_is_told_when_they_have_it(rig: Rig) -> None:
    engines = [Engine(rig, name) for name in ("one", "two")]
    former = {engine.key for engine in engines}
    for engine in engines:
        engine.heartbeat()
    first = rig.pool.replace_keys("", deadline_s=0.0)
    assert first.keys() == {"one", "two"}
    until(lambda: all(engine.heartbeat().host_key for engine in engines if engine.key in former))
    for engine in engines:
        engine.heartbeat()
    assert {engine.key for engine in engines}.isdisjoint(former)
    assert all(engine.key == engine.asked_for for engine in engines)


def test_an_engine_of_an_earlier_release_keeps_its_key(rig: Rig) -> None:
    """It would never learn of another one, and could not connect again."""
    engine = Engine(rig, "one")
    engine.heartbeat(is_old=True)
    assert rig.pool.replace_keys("", deadline_s=0.5) == {"one": KeyChange.UNABLE}
    assert engine.heartbeat(is_old=True).host_key == ""
    assert engine.asked_for == engine.key


def test_a_host_is_told_only_what_its_target_asks_for(rig: Rig) -> None:
    engine = Engine(rig, "one")
    engine.heartbeat()
    former = engine.key

    def refuse(change: str) -> None:
        if change.endswith("dhchap_key"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    rig.kernel.fault = refuse
    assert rig.pool.replace_keys("one", deadline_s=0.5) == {"one": KeyChange.TARGET_LACKS_IT}
    assert engine.heartbeat().host_key == ""
    assert engine.asked_for == former
    assert newest(rig) != former, "it is durable first"
    rig.kernel.fault = lambda change: None
    until(lambda: engine.heartbeat().host_key != "")
    assert engine.key == engine.asked_for != former
    assert engine.is_connected


def test_a_service_that_ends_in_between_goes_on_with_the_new_key(rig: Rig) -> None:
    engine = Engine(rig, "one")
    engine.heartbeat()
    rig.pool.close()
    HostKeys(rig.path / "holders").replace("one")  # as far as it came
    rig.open()
    until(lambda: engine.asked_for == newest(rig))
    assert engine.asked_for != engine.key
    assert engine.is_connected


def test_a_target_that_restarts_asks_for_the_key_that_came_last(rig: Rig) -> None:
    engine = Engine(rig, "one")
    engine.heartbeat()
    rig.pool.replace_keys("one", deadline_s=0.0)
    until(lambda: engine.heartbeat().host_key != "")
    rig.kernel.reboot()
    until(lambda: engine.export.host_nqn in rig.kernel.hosts)
    until(lambda: engine.asked_for == engine.key)
    assert engine.heartbeat().host_key == ""


def test_keys_have_their_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path, key_lifetime_s=0.5)
    try:
        engine, seen = Engine(rig, "one"), set[str]()
        end_s = time.monotonic() + 10.0
        while len(seen) < 4 and time.monotonic() < end_s:
            engine.heartbeat()
            seen.add(engine.key)
            time.sleep(0.05)
        assert len(seen) == 4
        assert engine.is_connected
    finally:
        rig.pool.close()


def test_who_has_no_key_cannot_get_one(rig: Rig) -> None:
    Engine(rig, "one")
    with pytest.raises(ServiceError, match="holder 'two' does not reach this pool through its exports") as caught:
        rig.pool.replace_keys("two", deadline_s=1.0)
    assert "mfctl pool status" in caught.value.next_step
    keyless = KeyKeeping(None, math.inf)
    with pytest.raises(UnsupportedError, match="authenticate is off"):
        keyless.replace(["one"], lambda: None, deadline_s=1.0)
    assert keyless.hear("one", OLD) == ""


def test_a_key_that_could_not_be_written_is_not_said_to_be_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(rig, "one")
    engine.heartbeat()
    former = engine.key

    def full(_disk: KeyDisk, file: Path, _text: str) -> None:
        raise MediaError(f"the key file {file}: No space left on device", next_step="make room")

    monkeypatch.setattr(KeyDisk, "write", full)
    assert rig.pool.replace_keys("one", deadline_s=0.5) == {"one": KeyChange.NOT_WRITTEN}
    engine.heartbeat()
    assert (engine.key, engine.asked_for, newest(rig)) == (former, former, former)


def test_a_first_key_that_is_being_written_holds_nobody_else_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may take its time; lookups and heartbeats have none."""
    engine, true = Engine(rig, "one"), KeyDisk.write
    has_begun, may_go_on = threading.Event(), threading.Event()

    def slow(disk: KeyDisk, file: Path, text: str) -> None:
        has_begun.set()
        assert may_go_on.wait(DEADLINE_S)
        true(disk, file, text)

    monkeypatch.setattr(KeyDisk, "write", slow)
    attaching = threading.Thread(target=rig.attach, args=("two",))
    attaching.start()
    assert has_begun.wait(DEADLINE_S)
    engine.heartbeat()
    assert rig.states() == {"one": "live"}, "two is not listed before its key is durable"
    may_go_on.set()
    attaching.join()
    assert rig.states() == {"one": "live", "two": "live"}


def test_nothing_waits_for_keys_of_a_pool_that_is_closed(rig: Rig) -> None:
    engine = Engine(rig, "one")
    engine.heartbeat()
    rig.kernel.fault = lambda change: time.sleep(0.01)
    ending = threading.Timer(0.3, rig.pool.close)
    ending.start()
    begun_s = time.monotonic()
    assert rig.pool.replace_keys("one", deadline_s=60.0)["one"] is not KeyChange.DONE
    assert time.monotonic() - begun_s < 30.0
    ending.join()


def test_a_pool_without_exports_has_no_keys(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool:
        request = api.AttachRequest("near", "vllm", "1", "h", 7, IDENTITY, rank_count=1)
        pool.attach(request, deadline_s=DEADLINE_S)
        with pytest.raises(UnsupportedError, match="exports nothing"):
            pool.replace_keys("", deadline_s=1.0)
        request_of_near = api.HeartbeatRequest("near", pool.status(deadline_s=1.0).epoch, (), host_key_id=OLD)
        assert pool.heartbeat(request_of_near, deadline_s=1.0).host_key == ""
