"""Taking a drive: each case by itself, then several hosts whose steps interleave in any way."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from meshfusion.jbof.drives.ownership import (
    DriveOwnedError,
    OwnerRecord,
    Ownership,
    Step,
    _do,
    carry_out,
    close,
    is_held,
    release,
    take,
)
from meshfusion.jbof.drives.reservation import ReservationConflictError
from meshfusion.jbof.errors import MediaError, MeshFusionError
from tests.jbof.drives.shared_drive import DriveAsHost, SharedDrive

A, B = uuid.UUID(int=0xA), uuid.UUID(int=0xB)


def run(host: DriveAsHost, steps: Generator[Step, Any, Any]) -> Any:
    return carry_out(steps, host, host)


def taken(host: DriveAsHost, key: int, *, owner: uuid.UUID = A, may_take_over: bool = False) -> Ownership:
    ownership = run(host, take(owner, key, may_take_over=may_take_over))
    assert isinstance(ownership, Ownership)
    return ownership


@pytest.fixture(params=[True, False], ids=["report", "no report"])
def drive(request: pytest.FixtureRequest) -> SharedDrive:
    return SharedDrive(can_report=request.param)


def test_a_new_drive(drive: SharedDrive) -> None:
    ownership = taken(drive.host("a"), 11)
    assert ownership == Ownership(OwnerRecord(1, A, 11, is_clean=False), needs_rebuild=False, was_taken_over=False)
    assert (drive.holder, drive.record) == ("a", ownership.record)
    assert run(drive.host("a"), is_held(ownership))


def test_an_owned_drive_is_refused_and_nothing_is_left(drive: SharedDrive) -> None:
    taken(drive.host("a"), 11)
    with pytest.raises(DriveOwnedError, match=r"owned by another service: host .*, key 000000000000000b"):
        taken(drive.host("b"), 22, owner=B)
    assert drive.keys == {"a": 11}
    assert drive.holder == "a"


def test_takeover(drive: SharedDrive) -> None:
    first = taken(drive.host("a"), 11)
    second = taken(drive.host("b"), 22, owner=B, may_take_over=True)
    assert second == Ownership(OwnerRecord(2, B, 22, is_clean=False), needs_rebuild=True, was_taken_over=True)
    assert drive.preempted == ["a"]
    assert not drive.may_write("a")
    with pytest.raises(ReservationConflictError):
        run(drive.host("a"), close(first))
    assert drive.record == second.record
    if drive.can_report:
        assert not run(drive.host("a"), is_held(first))


def test_after_an_orderly_end_nobody_has_to_allow_it(drive: SharedDrive) -> None:
    first = taken(drive.host("a"), 11)
    run(drive.host("a"), close(first))
    assert not drive.may_write("c")  # whoever owned it before
    second = taken(drive.host("b"), 22, owner=B)
    assert (second.needs_rebuild, second.was_taken_over, second.record.epoch) == (False, False, 2)


def test_the_same_machine_after_a_crash(drive: SharedDrive) -> None:
    taken(drive.host("a"), 11)
    again = taken(drive.host("a"), 12)
    assert (again.needs_rebuild, again.was_taken_over, again.record.epoch) == (True, False, 2)
    assert drive.keys == {"a": 12}


def test_the_same_service_under_another_host_identifier(drive: SharedDrive) -> None:
    """As with a user-space driver that makes one up at each start."""
    taken(drive.host("a"), 11)
    again = taken(drive.host("a-again"), 12)
    assert (again.needs_rebuild, again.was_taken_over, again.record.epoch) == (True, False, 2)
    assert drive.preempted == ["a"]
    assert not drive.may_write("a")


def test_release(drive: SharedDrive) -> None:
    run(drive.host("a"), release(taken(drive.host("a"), 11)))
    assert (drive.keys, drive.holder) == ({}, None)
    assert drive.may_write("b")


def test_a_foreign_reservation_without_a_name() -> None:
    """Somebody else's software holds it, and the drive cannot be asked by which key."""
    drive = SharedDrive(can_report=False, keys={"x": 99}, holder="x")
    with pytest.raises(DriveOwnedError, match=r"owned by another service\n"):
        taken(drive.host("a"), 11)
    with pytest.raises(MediaError, match="neither the drive nor its medium tells by which key"):
        taken(drive.host("a"), 11, may_take_over=True)
    assert drive.keys == {"x": 99}


def test_a_foreign_reservation_that_the_drive_tells_of() -> None:
    drive = SharedDrive(keys={"x": 99}, holder="x")
    with pytest.raises(DriveOwnedError):
        taken(drive.host("a"), 11)
    assert taken(drive.host("a"), 11, may_take_over=True).record.epoch == 1
    assert drive.preempted == ["x"]


class Broken(DriveAsHost):
    def write(self, record: OwnerRecord) -> None:
        raise MediaError("cannot be written", next_step="none")


def test_a_record_that_cannot_be_written(drive: SharedDrive) -> None:
    """It keeps the reservation: without one, an owner of before could come back."""
    taken(drive.host("a"), 11)
    with pytest.raises(MediaError, match="cannot be written"):
        taken(Broken(drive, "b"), 22, owner=B, may_take_over=True)
    assert not drive.may_write("a")
    assert taken(drive.host("b"), 23, owner=B).record.epoch == 2


def test_a_drive_that_keeps_changing_hands(drive: SharedDrive) -> None:
    class Hurried(DriveAsHost):
        """Just before it preempts, the holder gets a new key."""

        def preempt_and_abort(self, key: int, victim_key: int, kind: Any) -> None:
            self.drive.keys["a"] += 100
            super().preempt_and_abort(key, victim_key, kind)

    taken(drive.host("a"), 11)
    with pytest.raises(DriveOwnedError, match="changed hands"):
        taken(Hurried(drive, "b"), 22, owner=B, may_take_over=True)
    assert drive.holder == "a"
    assert "b" not in drive.keys


def test_an_orderly_end_is_the_former_owners_only(drive: SharedDrive) -> None:
    """b has taken over from a, which ended in order, and has not come to write its record: c must not take b's."""
    run(drive.host("a"), close(taken(drive.host("a"), 11)))
    steps = take(B, 22, may_take_over=False)
    step = next(steps)
    while drive.holder != "b":
        try:
            answer = _do(step, drive.host("b"), drive.host("b"))
        except ReservationConflictError as error:
            step = steps.throw(error)
        else:
            step = steps.send(answer)
    with pytest.raises(DriveOwnedError):
        taken(drive.host("c"), 33)
    assert drive.holder == "b"


HOSTS = ("a", "b", "c")
hosts = st.sampled_from(HOSTS)


class Hosts(RuleBasedStateMachine):
    """Three machines at one drive that keeps reservations. Whoever believes to own it writes now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.drive = SharedDrive(can_report=False)
        self.taking: dict[str, tuple[Generator[Step, Any, Ownership], Step, bool]] = {}
        self.owning: dict[str, Ownership] = {}
        self.next_key = 1
        self.epochs: list[int] = []
        self.newest_written = 0

    @rule(can_report=st.booleans())
    def another_kind_of_drive(self, can_report: bool) -> None:
        self.drive.can_report = can_report

    @rule(host=hosts, may_take_over=st.booleans())
    def begin(self, host: str, may_take_over: bool) -> None:
        if host in self.taking or host in self.owning:
            return
        steps = take(uuid.UUID(int=HOSTS.index(host)), self.next_key, may_take_over=may_take_over)
        self.next_key += 1
        self.taking[host] = (steps, next(steps), may_take_over)

    @precondition(lambda self: self.taking)
    @rule(host=hosts, count=st.integers(1, 8))
    def go_on(self, host: str, count: int) -> None:
        for _ in range(count):
            if host in self.taking:
                self._one_step(host)

    def _one_step(self, host: str) -> None:
        steps, step, may_take_over = self.taking.pop(host)
        at_drive = self.drive.host(host)
        before = len(self.drive.preempted)
        record, keys = self.drive.record, dict(self.drive.keys)
        try:
            try:
                answer = _do(step, at_drive, at_drive)
            except MeshFusionError as error:
                following = steps.throw(error)
            else:
                following = steps.send(answer)
        except StopIteration as end:
            self._own(host, end.value)
            return
        except MeshFusionError:
            return
        finally:
            if len(self.drive.preempted) > before and not may_take_over:
                # Only who has ended in order is preempted without being asked for.
                assert record is not None
                assert record.is_clean
                assert keys[self.drive.preempted[-1]] == record.key
        self.taking[host] = (steps, following, may_take_over)

    def _own(self, host: str, ownership: Ownership) -> None:
        assert ownership.record.epoch not in self.epochs, "two lives with one epoch"
        self.epochs.append(ownership.record.epoch)
        self.owning[host] = ownership

    @rule(host=hosts)
    def write(self, host: str) -> None:
        """Of one who believes to be the owner: it succeeds only if nobody has owned the drive since."""
        ownership = self.owning.get(host)
        if ownership is None:
            return
        if not self.drive.may_write(host):
            del self.owning[host]  # a conflict: it knows now
            return
        assert ownership.record.epoch >= self.newest_written, "a write of an earlier owner came after a later one's"
        assert self.drive.record is not None
        assert self.drive.record.epoch == ownership.record.epoch, "a write under another's record"
        self.newest_written = ownership.record.epoch

    @rule(host=hosts)
    def crash(self, host: str) -> None:
        self.taking.pop(host, None)
        self.owning.pop(host, None)

    @rule(host=hosts)
    def end_in_order(self, host: str) -> None:
        ownership = self.owning.pop(host, None)
        if ownership is None:
            return
        at_drive = self.drive.host(host)
        try:
            carry_out(close(ownership), at_drive, at_drive)
        except ReservationConflictError:
            assert self.drive.holder != host


TestHosts = Hosts.TestCase
TestHosts.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
