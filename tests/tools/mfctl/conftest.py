from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.tools.mfctl.context_file import VARIABLE


@pytest.fixture(autouse=True)
def contexts_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test alone, and not there yet: the contexts of whoever runs the tests are none of theirs."""
    path = tmp_path_factory.mktemp("contexts") / "contexts.yaml"
    monkeypatch.setenv(VARIABLE, str(path))
    return path
