"""When the card's system is made, and when the one of before will do."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.vdpu import image, packages


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Names of the packages of each system that was put together."""
    made: list[tuple[str, ...]] = []

    def bfb_of(files: tuple[Path, ...]) -> bytes:
        made.append(tuple(file.name for file in files))
        return " ".join(made[-1]).encode()

    monkeypatch.setattr(image, "bfb_of", bfb_of)
    monkeypatch.setattr(image, "ensure_packages", lambda names, note: None)
    return made


def offer(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(packages, "fetched", lambda cache, note: tuple(Path(name) for name in names))


def none_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(cache: Path, note: object) -> tuple[Path, ...]:
        raise LabError("no network", next_step="get one")

    monkeypatch.setattr(packages, "fetched", fetched)


def test_it_is_made_once_for_the_same_packages(
    tmp_path: Path, made: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, "a_1.deb", "b_1.deb")
    first = image.prepared_bfb(tmp_path, lambda text: None)
    assert first.read_bytes() == b"a_1.deb b_1.deb"
    assert image.prepared_bfb(tmp_path, lambda text: None) == first
    offer(monkeypatch, "a_1.deb", "b_2.deb")
    second = image.prepared_bfb(tmp_path, lambda text: None)
    assert second.read_bytes() == b"a_1.deb b_2.deb"
    assert len(made) == 2


def test_without_a_network_the_one_of_before_will_do(
    tmp_path: Path, made: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    none_to_be_had(monkeypatch)
    with pytest.raises(LabError, match="no network"):
        image.prepared_bfb(tmp_path, lambda text: None)
    offer(monkeypatch, "a_1.deb")
    before = image.prepared_bfb(tmp_path, lambda text: None)
    none_to_be_had(monkeypatch)
    told: list[str] = []
    assert image.prepared_bfb(tmp_path, told.append) == before
    assert "no network" in told[-1]
    monkeypatch.setattr(image, "RECIPE", image.RECIPE + 1)
    with pytest.raises(LabError, match="no network"):
        image.prepared_bfb(tmp_path, lambda text: None)
