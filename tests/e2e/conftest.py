"""Real engines on tiny models. Starting one takes some 10 s, so fixtures share what only needs to be made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Answer, Engines, Reference, embedded, engines_in, make_prompt
from tests.e2e.models import make_models

TEST_TIMEOUT_S = 1500
"""The first test pays for the models, the reference and the cold fill, with every file of a new venv read for the first
time. A hang is found much earlier: every call to an engine has a deadline of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    return make_models(ROOT / ".cache")


@pytest.fixture(scope="session")
def model(models: dict[str, Path]) -> Path:
    return models["llama"]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with engines_in(tmp_path) as engines:
        yield engines


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with engines_in(tmp_path_factory.mktemp("reference")) as engines:
        yield Reference(engines, model)


@dataclass(frozen=True, slots=True)
class Prompts:
    """``aligned`` is a whole number of chunks, ``unaligned`` is not, ``sibling`` shares the first 800 tokens of
    ``aligned``, ``short`` is less than a chunk."""

    aligned: list[int]
    unaligned: list[int]
    sibling: list[int]
    short: list[int]


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    aligned = make_prompt(1, 1024)
    return Prompts(aligned, make_prompt(2, 1000), aligned[:800] + make_prompt(3, 224), make_prompt(4, 100))


@dataclass(frozen=True, slots=True)
class FilledPool:
    """A closed pool that holds ``aligned`` and ``unaligned``; ``answers`` as given while it was filled.

    ``counts``: of the connector, then.
    """

    path: Path
    answers: dict[str, Answer]
    counts: dict[str, int]

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.path, to)
        return to


@pytest.fixture(scope="session")
def filled_pool(model: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> FilledPool:
    folder = tmp_path_factory.mktemp("filled")
    with engines_in(folder) as engines:
        engine = engines.start(model, embedded(folder / "pool"))
        names = ("aligned", "unaligned", "short")
        answers = {name: engine.answer(getattr(prompts, name)) for name in names}
        counts = engine.settle()["counts"]
        engine.close()
    return FilledPool(folder / "pool", answers, counts)


@pytest.fixture
def pool(filled_pool: FilledPool, tmp_path: Path) -> Path:
    """A copy of the filled pool, to be spoilt."""
    return filled_pool.copy(tmp_path / "pool")
