"""Keys of hosts that are replaced: when, in which order, and what each side knows of it."""

from __future__ import annotations

import errno
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.service_types import KeyChange
from meshfusion.dpu.export.key_rotation import RETRY_S, KeyRotation
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import MediaError, ServiceError, UnsupportedError
from meshfusion.jbof.nvme.auth_keys import key_id, parse_secret
from tests.dpu.export.keeper_cases import DEADLINE_S, Rig, keeper, until
from tests.dpu.pool_cases import IDENTITY, make_pool

OLD, NEW = "0" * 16, "1" * 16
LIFETIME_S = 1000.0


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_key_has_its_time_from_when_it_is_first_served() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    assert rotation.due(5.0, {"one": OLD}) == ()
    assert rotation.due(5.0 + LIFETIME_S - 1, {"one": OLD}) == ()
    assert rotation.due(5.0 + LIFETIME_S, {"one": OLD}) == ("one",)
    rotation.replaced(5.0 + LIFETIME_S, "one")
    rotation.heard("one", NEW)
    assert rotation.due(4.0 + 2 * LIFETIME_S, {"one": NEW}) == ()
    assert rotation.due(5.0 + 2 * LIFETIME_S, {"one": NEW}) == ("one",)


def test_a_host_that_says_nothing_of_its_key_keeps_it() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.ask("one")
    assert rotation.due(0.0, {"one": OLD}) == ()
    assert rotation.due(10 * LIFETIME_S, {"one": OLD}) == ()
    rotation.heard("one", OLD)
    assert rotation.due(10 * LIFETIME_S, {"one": OLD}) == ("one",), "it was asked for"


def test_a_host_that_has_not_learned_its_last_key_is_left_alone_by_the_clock_but_not_by_people() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    rotation.due(0.0, {"one": NEW})
    assert rotation.due(LIFETIME_S, {"one": NEW}) == ()
    rotation.ask("one")
    assert rotation.due(LIFETIME_S, {"one": NEW}) == ("one",)


def test_a_file_that_could_not_be_written_is_tried_again_later() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    rotation.due(0.0, {"one": OLD})
    rotation.failed(LIFETIME_S, "one")
    assert rotation.due(LIFETIME_S + RETRY_S - 1, {"one": OLD}) == ()
    assert rotation.due(LIFETIME_S + RETRY_S, {"one": OLD}) == ("one",)


def test_nothing_is_kept_of_who_is_not_served_any_more() -> None:
    rotation = KeyRotation(LIFETIME_S)
    rotation.heard("one", OLD)
    rotation.ask("one")
    assert rotation.due(0.0, {}) == ()
    rotation.heard("one", OLD)
    assert rotation.due(1.0, {"one": OLD}) == ()
    assert rotation.due(LIFETIME_S, {"one": OLD}) == ()
    assert rotation.due(LIFETIME_S + 1.0, {"one": OLD}) == ("one",)


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
    assert [(path.name, path.stat().st_mode & 0o777) for path in tmp_path.iterdir()] == [("one.key", 0o600)]


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
        with pytest.raises(MediaError, match=r"key file .*one.key: No space left"):
            keys.replace("one")
    assert (keys.read("one"), keys.wanted("one").id) == (former, key_id(former))
    keys.forget_all_but(["one"])
    assert [path.name for path in tmp_path.iterdir()] == ["one.key"], "what was begun is a secret, too"


# ---- a pool, its target and its hosts --------------------------------------------------------------------------------


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
    assert (rig.path / "holders" / "one.key").read_text().strip() == one.key
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
    assert (rig.path / "holders" / "one.key").read_text().strip() != former, "it is durable first"
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
    until(lambda: engine.asked_for == (rig.path / "holders" / "one.key").read_text().strip())
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
    exports = keeper(rig.kernel, None, uuid.UUID(int=1), PoolLayout(rig.path))
    exports._plan = replace(exports._plan, keys=None)
    with pytest.raises(UnsupportedError, match="authenticate is off"):
        exports.replace_keys(["one"], deadline_s=1.0)


def test_a_pool_without_exports_has_no_keys(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool:
        request = api.AttachRequest("near", "vllm", "1", "h", 7, IDENTITY, rank_count=1)
        pool.attach(request, deadline_s=DEADLINE_S)
        with pytest.raises(UnsupportedError, match="exports nothing"):
            pool.replace_keys("", deadline_s=1.0)
        request_of_near = api.HeartbeatRequest("near", pool.status(deadline_s=1.0).epoch, (), OLD)
        assert pool.heartbeat(request_of_near, deadline_s=1.0).host_key == ""
