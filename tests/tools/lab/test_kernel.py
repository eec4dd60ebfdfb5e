"""The kernel's cache: its key, its lock, what a failed build leaves. Building itself is tried by tests/lab."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshfusion.tools.lab import debian, kernel
from meshfusion.tools.lab.debian import Package
from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.host_steps import Steps, only_one
from meshfusion.tools.lab.kernel import (
    KERNEL_VARIABLE,
    compiled_files,
    config_fragment,
    options,
    origin_of,
    uml_kernel,
    unmet_options,
)

PACKAGE = Package("linux-source-6.1", "6.1.100-1")
ORIGIN = origin_of(PACKAGE, "CONFIG_X=y\n", "x86_64")

only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs hardware: User-Mode Linux runs on x86-64")


def ignore(text: str) -> None:
    pass


def steps(tmp_path: Path) -> Steps:
    return Steps("the build", tmp_path / "log", ignore)


@pytest.fixture
def distribution(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Package lists with one source package; nothing needs to be installed."""
    monkeypatch.setattr(kernel, "kernel_source", lambda note: PACKAGE)
    monkeypatch.setattr(kernel, "ensure_packages", lambda names, note: None)


def put_kernel(cache: Path, package: Package, fragment: str) -> Path:
    origin = origin_of(package, fragment, platform.machine())
    folder = cache / origin.key
    folder.mkdir(parents=True)
    (folder / "linux").touch()
    (folder / "kernel.json").write_text(json.dumps(asdict(origin)))
    return folder / "linux"


def test_key_depends_on_everything_that_it_is_built_from() -> None:
    others = [
        replace(ORIGIN, package="linux-source-6.12"),
        replace(ORIGIN, version="6.1.101-1"),
        replace(ORIGIN, architecture="other"),
        replace(ORIGIN, recipe=ORIGIN.recipe + 1),
        origin_of(PACKAGE, "CONFIG_X=y\nCONFIG_Y=y\n", "x86_64"),
    ]
    assert len({ORIGIN.key, *(other.key for other in others)}) == 1 + len(others)
    assert origin_of(PACKAGE, "CONFIG_X=y\n", "x86_64").key == ORIGIN.key
    assert ORIGIN.config_sha256 == hashlib.sha256(b"CONFIG_X=y\n").hexdigest()
    assert re.fullmatch("[0-9a-f]{16}", ORIGIN.key)


@only_x86
@pytest.mark.usefixtures("distribution")
def test_a_cached_kernel_is_used(cache: Path) -> None:
    cached = put_kernel(cache, PACKAGE, config_fragment())
    assert uml_kernel(cache, ignore) == cached


@only_x86
@pytest.mark.usefixtures("distribution")
def test_another_fragment_or_version_is_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_kernel(cache, PACKAGE, config_fragment() + "CONFIG_MORE=y\n")
    put_kernel(cache, replace(PACKAGE, version="older"), config_fragment())
    built: list[Package] = []

    def build(package: Package, origin: kernel.Origin, fragment: str, cache: Path, note: object) -> None:
        built.append(package)

    monkeypatch.setattr(kernel, "build", build)
    uml_kernel(cache, ignore)
    assert built == [PACKAGE]


@only_x86
def test_without_package_lists_a_kernel_of_the_same_configuration_does(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(note: object) -> Package:
        raise LabError("the package lists have no linux-source-*", next_step="apt-get update")

    monkeypatch.setattr(kernel, "kernel_source", nothing)
    put_kernel(cache, PACKAGE, "CONFIG_OTHER=y\n")
    with pytest.raises(LabError, match="package lists"):
        uml_kernel(cache, ignore)
    cached = put_kernel(cache, PACKAGE, config_fragment())
    assert uml_kernel(cache, ignore) == cached


def test_a_kernel_named_by_the_user(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.touch(0o755)
    monkeypatch.setenv(KERNEL_VARIABLE, str(own))
    assert uml_kernel(cache, ignore) == own
    own.chmod(0o644)
    with pytest.raises(LabError, match="not an executable"):
        uml_kernel(cache, ignore)


@only_x86
@pytest.mark.usefixtures("distribution")
def test_a_failed_build_names_its_log_and_leaves_nothing_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(package: Package, directory: Path, steps: Steps) -> Path:
        argv = ["sh", "-c", "echo the reason; exit 3"]
        steps.run("downloading", argv, directory=directory, deadline_s=10)
        raise AssertionError("not reached")

    monkeypatch.setattr(kernel, "download", download)
    (cache / "building-left-behind").mkdir(parents=True)
    with pytest.raises(LabError) as failure:
        uml_kernel(cache, ignore)
    (log,) = cache.glob("*.log")
    assert "downloading failed: exit status 3" in failure.value.message
    assert "the reason" in failure.value.message
    assert str(log) in failure.value.next_step
    assert "the reason" in log.read_text()
    assert sorted(f.name for f in cache.iterdir()) == sorted([log.name, "lock", "source.json"])


def test_options_of_a_configuration() -> None:
    text = '# CONFIG_A is not set\nCONFIG_B=y\nCONFIG_C="text"\nCONFIG_D=4096\n# a comment with CONFIG_E=y\n'
    assert options(text) == {"CONFIG_A": "n", "CONFIG_B": "y", "CONFIG_C": '"text"', "CONFIG_D": "4096"}


def test_unmet_options() -> None:
    fragment = "CONFIG_A=y\nCONFIG_B=n\nCONFIG_C=n\nCONFIG_D=1\nCONFIG_E=y\nCONFIG_F=n\n"
    config = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_D=2\nCONFIG_E=m\nCONFIG_F=y\n"
    assert unmet_options(fragment, config) == ["CONFIG_D=1", "CONFIG_E=y", "CONFIG_F=n"]


def test_the_fragment_names_each_option_once_and_every_group_says_why() -> None:
    text = config_fragment()
    names = re.findall(r"(?m)^(CONFIG_\w+)=", text)
    assert len(names) == len(set(names))
    for group in text.rstrip("\n").split("\n\n"):
        assert group.startswith("# ")
        assert re.fullmatch(r"(# .+\n)+(CONFIG_\w+=(y|n|\d+)\n)*", group + "\n"), group


def test_compiled_files() -> None:
    assert compiled_files("  CC      a.o\n  CC [M]  b.o\n  LD      c\n  HOSTCC  d\n  AS  e.o\n") == 2


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["linux-source-6.12", "linux-source-6.1"], "linux-source-6.1"),
        (["linux-source-6.8.0", "linux-source-6.12", "linux-source-6.9"], "linux-source-6.12"),
    ],
)
def test_which_source(names: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def apt_cache(*arguments: str) -> list[str]:
        if arguments[0] == "search":
            return [f"{name} - Linux kernel source" for name in names]
        return [f"Package: {arguments[-1]}", "Version: 1:2-3", "Description: kernel"]

    monkeypatch.setattr(debian, "_apt_cache", apt_cache)
    assert debian.kernel_source(ignore) == Package(chosen, "1:2-3")


def test_the_lists_are_read_again_when_they_change(tmp_path: Path) -> None:
    file, lists = tmp_path / "new" / "source.json", tmp_path / "lists"
    lists.mkdir()
    found = iter((PACKAGE, Package("newer", "2")))
    assert debian.remembered(file, lambda: next(found), lists) == PACKAGE
    assert debian.remembered(file, lambda: next(found), lists) == PACKAGE
    (lists / "main").touch()
    assert debian.remembered(file, lambda: next(found), lists) == Package("newer", "2")
    file.write_text("cut off")
    assert debian.remembered(file, lambda: PACKAGE, lists) == PACKAGE


def test_no_package_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "_apt_cache", lambda *arguments: [])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError) as failure:
        debian.kernel_source(ignore)
    assert "apt-get update" in failure.value.next_step


def test_a_step_past_its_deadline_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.tools.lab.host_steps.SIGN_OF_LIFE_S", 0.05)
    notes: list[str] = []
    slow = Steps("the build", tmp_path / "log", notes.append)
    with pytest.raises(LabError, match="compiling failed: not done after 0 s"):
        slow.run("compiling", ["sleep", "8"], directory=tmp_path, deadline_s=0.2, progress=lambda: "7 files")
    assert notes[:2] == ["the build: compiling", "the build: compiling 7 files"]


HOLD = """
import sys, time
from pathlib import Path
from meshfusion.tools.lab.host_steps import only_one
with only_one(Path(sys.argv[1]), print, 5):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_one_waits_for_the_other(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "lock"
    argv = [sys.executable, "-c", HOLD, str(lock), "1"]
    notes: list[str] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        began = time.monotonic()
        with only_one(lock, notes.append, 20.0):
            assert holder.poll() is not None or holder.wait(5) == 0
        assert 0.2 < time.monotonic() - began < 10
    assert len(notes) == 1
    assert "waiting" in notes[0]


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with only_one(lock, ignore, 1.0), pytest.raises(LabError, match="still held"), only_one(lock, ignore, 0.3):
        pass
