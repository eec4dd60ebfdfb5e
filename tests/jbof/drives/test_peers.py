from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.drives.life_words import Speed
from meshfusion.jbof.drives.peers import PeerLimits, Window, speeds


def judged(**latencies_ms: float) -> dict[str, Speed]:
    return speeds({name: Window(100, ms / 1e3) for name, ms in latencies_ms.items()})


def test_one_slow_drive() -> None:
    found = judged(a=10, b=11, c=12, d=40)
    assert found == {"a": Speed.NORMAL, "b": Speed.NORMAL, "c": Speed.NORMAL, "d": Speed.SLOW}


def test_a_load_that_slows_all_of_them_is_nobodys_fault() -> None:
    assert set(judged(a=500, b=510, c=620, d=490).values()) == {Speed.NORMAL}


def test_between_both_nothing_is_told() -> None:
    assert judged(a=10, b=10, c=10, d=20)["d"] is Speed.UNTOLD


def test_a_slow_drive_does_not_hide_behind_itself() -> None:
    """Of three drives, it is not among those that it is compared with."""
    assert judged(a=10, b=10, c=31)["c"] is Speed.SLOW


def test_fast_is_never_slow() -> None:
    assert judged(a=0.1, b=0.1, c=4.9)["c"] is Speed.NORMAL


def test_too_few_peers_or_commands() -> None:
    assert set(judged(a=10, b=1000).values()) == {Speed.UNTOLD}
    windows = {"a": Window(100, 0.01), "b": Window(100, 0.01), "c": Window(19, 9.0), "d": Window(100, 9.0)}
    found = speeds(windows)
    assert found["c"] is Speed.UNTOLD
    assert found["d"] is Speed.SLOW
    assert speeds({}) == {}


@given(st.dictionaries(st.integers(), st.floats(0.0001, 100), min_size=3, max_size=24))
def test_only_a_minority_is_slow(latencies: dict[int, float]) -> None:
    limits = PeerLimits(floor_s=0.0)
    found = speeds({key: Window(100, value) for key, value in latencies.items()}, limits)
    assert sum(speed is Speed.SLOW for speed in found.values()) <= len(latencies) / 2
    fastest = min(latencies, key=lambda key: latencies[key])
    assert found[fastest] is Speed.NORMAL
