"""Which drives hosts are shown: never one anew before the target has let go of what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.export.drive_showing import DriveShowing, DrivesNow

HERE, THERE = Path("/dev/a"), Path("/dev/b")


@pytest.fixture
def showing() -> DriveShowing:
    return DriveShowing()


def test_what_is_here_at_the_start_is_shown_and_what_is_not_is_taken_out(showing: DriveShowing) -> None:
    showing.begin(0, HERE)
    showing.begin(1, None)
    assert showing.now() == DrivesNow({0: HERE}, {1: None})
    assert (showing.is_shown(0), showing.is_out(0)) == (True, False)
    assert (showing.is_shown(1), showing.is_out(1)) == (False, False), "an earlier life may have shown it"
    assert not showing.taken_out(1), "it is not here"
    assert showing.is_out(1)
    assert showing.now() == DrivesNow({0: HERE}, {})


def test_one_that_goes_is_outgoing_from_where_it_was_until_it_is_confirmed(showing: DriveShowing) -> None:
    showing.begin(0, HERE)
    showing.stand(0, None)
    assert showing.now() == DrivesNow({}, {0: HERE})
    assert not showing.is_out(0)
    assert not showing.taken_out(0)
    assert showing.is_out(0)
    assert not showing.taken_out(0), "told twice"


@pytest.mark.parametrize("place", [HERE, THERE])
def test_one_that_is_back_before_it_was_out_is_shown_after_that(showing: DriveShowing, place: Path) -> None:
    showing.begin(0, HERE)
    showing.stand(0, None)
    showing.stand(0, place)
    assert showing.now() == DrivesNow({}, {0: HERE})
    assert showing.taken_out(0)
    assert showing.now() == DrivesNow({0: place}, {})


def test_one_that_lies_elsewhere_is_taken_out_first(showing: DriveShowing) -> None:
    showing.begin(0, HERE)
    showing.stand(0, THERE)
    assert showing.now() == DrivesNow({}, {0: HERE})
    assert showing.taken_out(0)
    assert showing.now() == DrivesNow({0: THERE}, {})


def test_a_new_one_is_shown_when_nobody_shows_one_of_its_number(showing: DriveShowing) -> None:
    showing.stand(3, HERE)
    assert showing.now() == DrivesNow({}, {3: None})
    assert showing.taken_out(3)
    assert showing.is_shown(3)


def test_one_that_is_out_is_shown_at_once(showing: DriveShowing) -> None:
    showing.begin(0, None)
    showing.taken_out(0)
    showing.stand(0, HERE)
    assert showing.now() == DrivesNow({0: HERE}, {})


def test_a_confirmation_of_one_that_is_shown_or_has_left_says_nothing(showing: DriveShowing) -> None:
    showing.begin(0, HERE)
    assert not showing.taken_out(0)
    assert showing.is_shown(0)
    showing.end(0)
    assert not showing.taken_out(0)
    assert showing.is_out(0)
    assert showing.now() == DrivesNow({}, {})


@given(st.lists(st.sampled_from([HERE, THERE, None, "confirmed"])))
def test_between_two_places_the_target_has_confirmed(steps: list[Path | str | None]) -> None:
    showing = DriveShowing()
    showing.begin(0, HERE)
    last: Path | None = HERE  # what the target may have open
    for step in steps:
        if step == "confirmed":
            if 0 in showing.now().outgoing:
                last = None
            showing.taken_out(0)
        else:
            assert step is None or isinstance(step, Path)
            showing.stand(0, step)
        now = showing.now()
        shown = now.shown.get(0)
        assert shown is None or last in (None, shown)
        assert not (showing.is_out(0) and last is not None)
        last = shown or last
