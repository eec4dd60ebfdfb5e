"""Missing packages: installed by root, told as one line to everybody else."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.packages import GUEST, TCG, UML_BUILD, apt_line, ensure_packages, missing_packages
from tests.tools.lab.fakes import executable, fake_dpkg_query


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH besides the shell's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return tmp_path


def ignore(text: str) -> None:
    pass


def test_lists() -> None:
    names = [*GUEST, *UML_BUILD, *TCG]
    assert len(names) == len(set(names))
    assert all(re.fullmatch("[a-z0-9][a-z0-9+.-]+", name) for name in names)


def test_what_is_missing(programs: Path) -> None:
    says = "gcc installed\nmake not-installed\nbc config-files"
    executable(
        programs / "dpkg-query", f"#!/bin/sh\necho '{says}'\necho 'no packages found matching flex' >&2\nexit 1\n"
    )
    assert missing_packages(["make", "gcc", "flex", "bc"]) == ("bc", "flex", "make")


def test_all_there(programs: Path) -> None:
    fake_dpkg_query(programs, installed=True)
    assert missing_packages(UML_BUILD) == ()
    ensure_packages(UML_BUILD, ignore)


def test_one_line_for_who_is_not_root(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dpkg_query(programs, installed=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError) as failure:
        ensure_packages(["make", "gcc"], ignore)
    line = "sudo apt-get update && sudo apt-get install -y --no-install-recommends gcc make"
    assert failure.value.next_step.splitlines()[-1] == line == apt_line(["gcc", "make"])


def test_root_installs(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dpkg_query(programs, installed=False)
    log = programs / "log"
    executable(programs / "apt-get", f'#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >> {log}\n')
    monkeypatch.setattr("os.geteuid", lambda: 0)
    ensure_packages(["make"], ignore)
    updated, installed = log.read_text().splitlines()
    assert updated == "noninteractive update -qq"
    assert installed == "noninteractive install -y --no-install-recommends -qq make"


def test_a_failed_installation(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dpkg_query(programs, installed=False)
    executable(programs / "apt-get", "#!/bin/sh\necho 'E: Unable to locate package make' >&2\nexit 100\n")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(LabError, match="Unable to locate package make"):
        ensure_packages(["make"], ignore)


def test_elsewhere_than_on_debian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not os.listdir(tmp_path)
    assert missing_packages(["make"]) == ()
