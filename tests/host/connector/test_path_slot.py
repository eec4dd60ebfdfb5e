"""The worker's path: opened beside the engine's thread, taken up when it is there, and ended in order."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from meshfusion.dpu.api.types import Attachment, Export, Namespace, Portal, Reached
from meshfusion.host.connector.path_gate import PathState
from meshfusion.host.connector.vllm import path_slot
from meshfusion.host.connector.vllm.path_slot import PathSlot
from meshfusion.host.path.data_path import DataPath
from meshfusion.jbof.errors import ConfigError, MediaError
from tests.host.support.waiting import until

EXPORT = Export("nqn.2026-11.io.meshfusion:s", "nqn.2026-11.io.meshfusion:h", (Portal("rdma", "10.0.0.1", 4420),))
FAR = Attachment("pool", "one", 1, (Namespace(1, "", 4096, 1 << 20),), "", 30.0, 60.0, 5.0, EXPORT)
LOCAL = replace(FAR, holder_id="local-1", liveness_path="/run/one.alive", export=None)


class FakeDrives:
    """Those of a target. ``away``: NSIDs that it does not show; ``error``: of none at all."""

    def __init__(self, nsids: set[int]) -> None:
        self.nsids = frozenset(nsids)
        self.away: set[int] = set()
        self.error: Exception | None = None
        self.asked: list[int] = []  # with which version

    def reach(self, attachment: Attachment) -> None:
        self.asked.append(attachment.drives_version)
        if self.error is not None:
            raise self.error
        self.nsids = frozenset(namespace.nsid for namespace in attachment.namespaces) - self.away


class FakePath:
    def __init__(self, holder_id: str, exported: FakeDrives | None = None) -> None:
        self.holder_id = holder_id
        self.exported = exported
        self.keys: list[str] = []
        self.finished = threading.Event()
        self.is_closed = False

    def take_key(self, host_key: str) -> None:
        if host_key == "damaged":
            raise ConfigError("the key is damaged", next_step="-")
        self.keys.append(host_key)

    def finish(self, *, deadline_s: float) -> bool:
        self.finished.set()
        return True

    def close(self, *, deadline_s: float = 5.0) -> bool:
        self.is_closed = True
        return True


class Opener:
    """Opens when it is let; ``error``: instead."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.let.set()
        self.error: Exception | None = None
        self.opened: list[str] = []
        self.drives: FakeDrives | None = None

    def __call__(self, attachment: Attachment) -> DataPath:
        assert self.let.wait(20)
        self.opened.append(attachment.holder_id)
        if self.error is not None:
            raise self.error
        return cast(DataPath, FakePath(attachment.holder_id, self.drives))


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def slot(opener: Opener) -> PathSlot:
    return PathSlot(opener)


def follow(slot: PathSlot, attachment: Attachment, *, is_writing: bool = False) -> None:
    slot.follow(attachment, is_writing=is_writing)
    until(slot.advance)


def holder_of(slot: PathSlot) -> str:
    return cast(Any, slot.path).holder_id if slot.path is not None else ""


def test_a_path_is_taken_up_when_it_is_open_and_nobody_waits_for_it(slot: PathSlot, opener: Opener) -> None:
    opener.let.clear()
    slot.follow(FAR, is_writing=False)
    assert (slot.advance(), slot.path, slot.opening_holder_id) == (False, None, "one")
    assert slot.take_change() is None
    opener.let.set()
    until(slot.advance)
    assert (holder_of(slot), slot.attachment, slot.opening_holder_id) == ("one", FAR, "")
    assert (slot.take_change(), slot.take_change()) == (PathState("one"), None)
    slot.follow(FAR, is_writing=False)
    assert (slot.opening_holder_id, opener.opened) == ("", ["one"])


def test_the_former_path_serves_until_the_next_is_open_and_then_ends_in_its_time(
    slot: PathSlot, opener: Opener
) -> None:
    follow(slot, FAR)
    former = cast(Any, slot.path)
    opener.let.clear()
    slot.follow(replace(FAR, holder_id="two"), is_writing=False)
    assert not slot.advance()
    assert (holder_of(slot), slot.opening_holder_id) == ("one", "two")
    opener.let.set()
    until(slot.advance)
    assert holder_of(slot) == "two"
    assert former.finished.wait(10)


def test_a_new_key_of_the_same_incarnation_goes_to_its_path_also_while_it_writes(
    slot: PathSlot, opener: Opener
) -> None:
    follow(slot, FAR)
    path = cast(Any, slot.path)
    again = replace(FAR, export=replace(EXPORT, host_key="new"))
    slot.follow(again, is_writing=True)
    slot.follow(again, is_writing=False)
    assert (path.keys, opener.opened, slot.attachment) == (["new"], ["one"], again)
    other = replace(again, holder_id="two", export=replace(EXPORT, host_nqn="nqn.x:two", host_key="of two"))
    slot.follow(other, is_writing=True)
    assert path.keys == ["new"], "another incarnation's key is not this one's"


def test_a_key_that_is_none_costs_nobody_anything(
    slot: PathSlot, opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's thread follows."""
    follow(slot, FAR)
    for _ in range(2):
        slot.follow(replace(FAR, export=replace(EXPORT, host_key="damaged")), is_writing=False)
        slot.follow(replace(FAR, export=replace(EXPORT, host_key="")), is_writing=False)
    assert "a new key is of no use: the key is damaged" in caplog.text
    again = replace(FAR, export=replace(EXPORT, host_key="new"))
    slot.follow(again, is_writing=False)
    assert (cast(Any, slot.path).keys, opener.opened) == (["new"], ["one"])


def test_a_key_that_came_while_the_path_was_being_opened_is_not_missed(slot: PathSlot, opener: Opener) -> None:
    opener.let.clear()
    slot.follow(FAR, is_writing=False)
    again = replace(FAR, export=replace(EXPORT, host_key="new"))
    slot.follow(again, is_writing=False)
    opener.let.set()
    until(slot.advance)
    slot.follow(again, is_writing=False)
    assert cast(Any, slot.path).keys == ["new"]


def test_nothing_changes_while_something_is_written(slot: PathSlot, opener: Opener) -> None:
    follow(slot, FAR)
    slot.follow(replace(FAR, holder_id="two"), is_writing=True)
    assert (slot.opening_holder_id, slot.attachment) == ("", FAR)


def test_drives_that_are_reached_otherwise_are_opened_anew_while_the_former_path_serves(
    slot: PathSlot, opener: Opener
) -> None:
    follow(slot, LOCAL)
    former = cast(Any, slot.path)
    second = Namespace(2, "/two", 4096, 1 << 20)
    again = replace(LOCAL, namespaces=(*LOCAL.namespaces, second), drives_version=1)
    slot.follow(again, is_writing=True)
    assert slot.opening_holder_id == "", "not under what is being written"
    opener.let.clear()
    slot.follow(again, is_writing=False)
    assert (slot.path, slot.is_opening_to(again)) == (former, True)
    assert (slot.reaches({1}), slot.reaches({1, 2})) == (True, False)
    opener.let.set()
    until(slot.advance)
    assert slot.path is not former
    assert slot.reaches({1, 2})
    assert former.finished.wait(10)
    slot.follow(again, is_writing=False)
    assert opener.opened == ["local-1", "local-1"]


def test_what_is_opened_here_serves_the_next_incarnation_of_the_same_pool(slot: PathSlot, opener: Opener) -> None:
    follow(slot, LOCAL)
    again = replace(LOCAL, holder_id="local-2")
    slot.take_change()
    slot.follow(again, is_writing=False)
    assert (slot.attachment, holder_of(slot), opener.opened) == (again, "local-1", ["local-1"])
    assert slot.take_change() == PathState("local-2")
    follow(slot, replace(LOCAL, holder_id="local-3", pool_uuid="another"))
    assert opener.opened == ["local-1", "local-3"]


def test_a_path_out_of_reach_is_told_once_and_tried_again(
    slot: PathSlot, opener: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opener.error = MediaError("no such target", next_step="start it")
    with caplog.at_level(logging.ERROR, logger="meshfusion.worker"):
        follow(slot, FAR)
        state = slot.take_change()
        assert state is not None
        assert (state.holder_id, "no such target" in state.problem) == ("one", True)
        slot.follow(FAR, is_writing=False)
        assert slot.opening_holder_id == "", "not at every step"
        monkeypatch.setattr(slot, "_retry_from_s", 0.0)
        follow(slot, FAR)
        assert len(caplog.records) == 1
    opener.error = None
    monkeypatch.setattr(slot, "_retry_from_s", 0.0)
    follow(slot, FAR)
    assert (holder_of(slot), slot.take_change()) == ("one", PathState("one"))


def test_a_former_path_promises_nothing_once_the_next_cannot_be_opened(slot: PathSlot, opener: Opener) -> None:
    """Its incarnation is silent, and so it is cut off soon; what is under way on it may end."""
    follow(slot, FAR)
    slot.take_change()
    opener.error = MediaError("no such target", next_step="start it")
    follow(slot, replace(FAR, holder_id="two"))
    state = slot.take_change()
    assert state is not None
    assert ("no such target" in state.problem, holder_of(slot)) == (True, "one")


@pytest.mark.parametrize("attachment", [FAR, LOCAL])
def test_nothing_is_read_from_a_former_pool(slot: PathSlot, opener: Opener, attachment: Attachment) -> None:
    """Its bytes would be taken for damage of the new pool's chunks, which would be dropped."""
    follow(slot, attachment)
    former = cast(Any, slot.path)
    opener.let.clear()
    slot.follow(replace(attachment, holder_id="two", pool_uuid="another"), is_writing=False)
    assert (slot.path, slot.attachment, slot.opening_holder_id) == (None, None, "two")
    assert former.finished.wait(10)
    opener.let.set()
    until(slot.advance)
    assert holder_of(slot) == "two"


def test_a_bug_while_opening_costs_the_cache_and_nothing_waits_for_ever(slot: PathSlot, opener: Opener) -> None:
    opener.error = RuntimeError("a bug")
    follow(slot, FAR)
    state = slot.take_change()
    assert state is not None
    assert "a bug" in state.problem


def test_closing_ends_what_is_open_and_what_comes_later(
    opener: Opener, slot: PathSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[FakePath] = []
    monkeypatch.setattr(path_slot, "DataPath", FakePath)
    follow(slot, FAR)
    path = cast(Any, slot.path)
    opener.let.clear()

    def open_late(attachment: Attachment) -> DataPath:
        late.append(cast(FakePath, opener(attachment)))
        return cast(DataPath, late[0])

    slot._open_path = open_late
    slot.follow(replace(FAR, holder_id="two"), is_writing=False)
    assert slot.close(deadline_s=1.0)
    assert (path.is_closed, slot.path) == (True, None)
    opener.let.set()
    until(lambda: bool(late) and late[0].is_closed)


# ---- drives of a target ----------------------------------------------------------------------------------------------


def with_drives(version: int, *nsids: int) -> Attachment:
    namespaces = tuple(Namespace(nsid, "", 4096, 1 << 20) for nsid in nsids)
    return replace(FAR, namespaces=namespaces, drives_version=version)


@pytest.fixture
def drives(opener: Opener, slot: PathSlot) -> FakeDrives:
    """Of a path that is open."""
    opener.drives = FakeDrives({1})
    follow(slot, with_drives(0, 1))
    assert slot.take_change() == PathState("one", reached=Reached(0, (1,)))
    return opener.drives


def follow_drives(slot: PathSlot, attachment: Attachment) -> None:
    """Over the path that is in use, also while something is written."""
    slot.follow(attachment, is_writing=True)
    until(lambda: slot._following is None or slot._following.result is not None)
    assert not slot.advance(), "nothing waits for it"


def test_a_drive_that_comes_is_reached_over_the_path_that_is_in_use(
    slot: PathSlot, opener: Opener, drives: FakeDrives
) -> None:
    path = slot.path
    slot.follow(with_drives(0, 1), is_writing=False)
    assert drives.asked == []
    follow_drives(slot, with_drives(1, 1, 2))
    assert slot.take_change() == PathState("one", reached=Reached(1, (1, 2)))
    assert slot.reaches({1, 2})
    assert (slot.path, slot.opening_holder_id, opener.opened) == (path, "", ["one"])
    follow_drives(slot, with_drives(2, 2))
    assert slot.take_change() == PathState("one", reached=Reached(2, (2,)))
    assert drives.asked == [1, 2]


def test_a_key_that_came_while_a_drive_was_proven_stays(slot: PathSlot, drives: FakeDrives) -> None:
    more = with_drives(1, 1, 2)
    slot.follow(more, is_writing=False)
    until(lambda: slot._following is not None and slot._following.result is not None)
    again = replace(more, export=replace(EXPORT, host_key="new"))
    slot.follow(again, is_writing=False)
    assert not slot.advance()
    assert slot.attachment == again
    slot.follow(again, is_writing=False)
    assert (cast(Any, slot.path).keys, drives.asked) == (["new"], [1])


def test_a_drive_that_is_not_shown_yet_is_tried_again(
    slot: PathSlot, drives: FakeDrives, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives.away = {2}
    follow_drives(slot, with_drives(1, 1, 2))
    assert slot.take_change() == PathState("one", reached=Reached(1, (1,)))
    follow_drives(slot, with_drives(1, 1, 2))
    assert drives.asked == [1], "not at every step"
    monkeypatch.setattr(slot, "_follow_from_s", 0.0)
    follow_drives(slot, with_drives(1, 1, 2))
    assert (drives.asked, slot.take_change()) == ([1, 1], None)
    drives.away = set()
    monkeypatch.setattr(slot, "_follow_from_s", 0.0)
    follow_drives(slot, with_drives(1, 1, 2))
    assert slot.take_change() == PathState("one", reached=Reached(1, (1, 2)))


def test_trouble_with_drives_does_not_end_the_path(
    slot: PathSlot, drives: FakeDrives, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives.error = MediaError("no path reaches it now", next_step="-")
    follow_drives(slot, with_drives(1, 1, 2))
    assert (holder_of(slot), slot.take_change(), drives.asked) == ("one", None, [1])
    follow_drives(slot, with_drives(1, 1, 2))
    assert drives.asked == [1]
    drives.error = None
    follow_drives(slot, with_drives(2, 1, 2))
    assert slot.take_change() == PathState("one", reached=Reached(2, (1, 2))), "of another version it asks at once"


def test_what_a_former_path_reaches_is_not_told_of_the_next(slot: PathSlot, opener: Opener, drives: FakeDrives) -> None:
    slot.follow(with_drives(1, 1, 2), is_writing=False)
    until(lambda: slot._following is not None and slot._following.result is not None)
    opener.drives = FakeDrives({1})
    slot._path = cast(DataPath, FakePath("two", opener.drives))
    assert not slot.advance()
    assert slot.take_change() is None
