"""What several of the lab's tests need: a place for its cache, and boot folders that they can look at."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from meshfusion.tools.lab.kernel import KERNEL_VARIABLE
from meshfusion.tools.lab.places import CACHE_VARIABLE
from tests.tools.lab.fakes import fake_dpkg_query, fake_kernel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab's cache folder, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.delenv(KERNEL_VARIABLE, raising=False)
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Boot folders are made here, by child processes too."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def fake_machine(tmp_path: Path, cache: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package is installed, and the kernel is a script that serves as a guest does."""
    programs = tmp_path / "programs"
    programs.mkdir()
    fake_dpkg_query(programs, installed=True)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv(KERNEL_VARIABLE, str(fake_kernel(tmp_path)))
