"""The engine makes of each tiny model what the table says, and every KV group of it matters to the answers.

Without a connector: what later comparisons take for granted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import ROOT
from tests.e2e.hybrid_models import HYBRID_MODELS, ExpectedGroup, make_hybrid_models
from tests.e2e.hybrid_probe import probe

COMPARABLE = [name for name, model in HYBRID_MODELS.items() if model.runs_on_cpu and not model.reason]


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPARABLE)
def test_the_engine_makes_of_a_model_what_the_table_says(name: str, tmp_path: Path) -> None:
    model = HYBRID_MODELS[name]
    found = probe(model, make_hybrid_models(ROOT / ".cache", [name])[name], tmp_path / "log")
    assert "error" not in found, found["error"]
    assert tuple(ExpectedGroup(**group) for group in found["groups"]) == model.groups
    recurrent = [str(at) for at, group in enumerate(model.groups) if group.spec == "MambaSpec"]
    assert found["offers"] == {group: list(model.boundaries) for group in recurrent}
    assert found["again"]["cached"] == model.cached_tokens
    assert found["again"]["same"]
    assert found["again"]["distance"] < model.tolerance
    # With any one group's bytes replaced by those of another prompt, nothing passes for right.
    assert len(found["replaced"]) == len(model.groups)
    for group in found["replaced"]:
        assert group["blocks"] > 0
        assert group["distance"] > 3 * model.tolerance
    assert found["restored"] < model.tolerance
