"""``mfctl image lock`` from real apt and pip over small sources of our own, and building from what it made."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.jbof.config_problems import ConfigProblemsError
from meshfusion.tools.image.architecture import ARCHITECTURES
from meshfusion.tools.image.errors import BuildError
from meshfusion.tools.image.lock import Lock, lock_text, make_lock, read_lock
from meshfusion.tools.image.requirements import DEBIAN_ROOTS
from meshfusion.tools.image.source import LOCKS
from meshfusion.tools.mfctl.main import mfctl
from tests.tools.image.small import World, elf, make_deb, make_wheel, make_world

ROOT = Path(__file__).parents[3]
SHA = "ab" * 32


class Sources:
    """A Debian and an index of wheels, in folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.debian = folder / "debian"
        self.wheels = folder / "wheels"
        self.list = folder / "sources.list"

    def copied(self, folder: Path) -> Sources:
        shutil.copytree(self.folder, folder)
        made = Sources(folder)
        made.list.write_text(f"deb [trusted=yes] file:{made.debian} bookworm main\n")
        return made

    def fill(self) -> None:
        for made in (self.debian, self.wheels):
            made.mkdir()
        for name in sorted(set(DEBIAN_ROOTS["spdk"])):
            self.add_deb(name, depends="libdeep" if name == "libssl3" else "")
        self.add_deb("libdeep")
        make_wheel(self.wheels / "one-1.4-py3-none-any.whl", "one", "1.4", {"one.py": b"old"})
        make_wheel(self.wheels / "one-1.5-cp311-abi3-manylinux_2_28_aarch64.whl", "one", "1.5", {"one.py": b"new"})
        make_wheel(self.wheels / "one-1.6-cp311-abi3-manylinux_2_39_aarch64.whl", "one", "1.6", {"one.py": b"libc"})
        make_wheel(self.wheels / "one-1.7-cp311-abi3-manylinux_2_28_x86_64.whl", "one", "1.7", {"one.py": b"foreign"})
        make_wheel(self.wheels / "spdk-26.9-py3-none-any.whl", "spdk", "26.9", {"spdk.py": b""})
        self.publish()

    def add_deb(self, name: str, *, version: str = "1.0-1", depends: str = "") -> None:
        files: dict[str, bytes | str] = {f"usr/share/{name}": version.encode()}
        files |= {"usr/bin/python3.11": elf("arm64")} if name == "python3.11" else {}
        path = self.debian / f"{name}_{version}_arm64.deb"
        make_deb(path, name, files, version=version, depends=depends, programs=("usr/bin/python3.11",))

    def publish(self, *, origin: str = "Debian", codename: str = "bookworm") -> None:
        """As dpkg-scanpackages and apt-ftparchive would, which are not everywhere."""
        listed = []
        for path in sorted(self.debian.glob("*.deb")):
            control = subprocess.run(["dpkg-deb", "--field", str(path)], capture_output=True, text=True, check=True)
            data = path.read_bytes()
            where = f"Filename: {path.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
            listed.append(control.stdout + where)
        packages = "\n".join(listed).encode()
        place = "main/binary-arm64/Packages"
        suite = self.debian / "dists" / "bookworm"
        (suite / place).parent.mkdir(parents=True, exist_ok=True)
        (suite / place).write_bytes(packages)
        digest = f" {hashlib.sha256(packages).hexdigest()} {len(packages)} {place}\n"
        head = f"Origin: {origin}\nLabel: Debian\nSuite: oldstable\nCodename: {codename}\nArchitectures: arm64\n"
        head += "Components: main\n"
        head += "Date: Tue, 14 Nov 2023 22:13:20 UTC\n"
        (suite / "Release").write_text(f"{head}SHA256:\n{digest}")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    made = Sources(tmp_path_factory.mktemp("filled"))
    made.fill()
    return made


@pytest.fixture
def sources(filled: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    made = filled.copied(tmp_path / "sources")
    _only_from(made, monkeypatch)
    return made


def _only_from(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(sources.wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


class Work:
    def __init__(self, folder: Path, world: World, sources: Sources) -> None:
        self.world = world
        self.lock = folder / "lock.json"
        self.cache = folder / "cache"
        self.folder = folder
        self._common = [
            "--source", str(self.world.repository), "--cache", str(self.cache), "--apt-sources", str(sources.list),
        ]  # fmt: skip

    def make_lock(self, *options: str) -> Result:
        arguments = ["image", "lock", "--output", str(self.lock), *self._common, *options]
        return CliRunner().invoke(mfctl, arguments)

    def build(self, name: str, *options: str) -> Result:
        arguments = ["image", "build", str(self.folder / name), "--lock", str(self.lock), *self._common, *options]
        return CliRunner().invoke(mfctl, [*arguments, "--config", str(self.world.config)])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def work(tmp_path: Path, world: World, sources: Sources) -> Work:
    return Work(tmp_path, world, sources)


@pytest.fixture(scope="module")
def made(filled: Sources, world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A lock of what :class:`Sources` has."""
    folder = tmp_path_factory.mktemp("made")
    sources = filled.copied(folder / "sources")
    with pytest.MonkeyPatch.context() as patch:
        _only_from(sources, patch)
        result = Work(folder, world, sources).make_lock()
    assert result.exit_code == 0, result.output
    return (folder / "lock.json").read_text()


def test_a_lock_is_resolved_and_built_from(work: Work, sources: Sources) -> None:
    result = work.make_lock("--format", "json")
    assert result.exit_code == 0, result.output
    lock = read_lock(work.lock.read_text(), "lock")
    found = {deb.name: deb for deb in lock.debs}
    assert found.keys() == {*DEBIAN_ROOTS["spdk"], "libdeep"}
    deep = (sources.debian / "libdeep_1.0-1_arm64.deb").read_bytes()
    assert found["libdeep"].sha256 == hashlib.sha256(deep).hexdigest()
    assert (found["libdeep"].targets, found["python3.11"].targets) == (["spdk"], ["nvmet", "spdk"])
    one, spdk = lock.wheels
    assert (one.version, one.targets) == ("1.5", ["nvmet", "spdk"]), "the newest for this processor and C library"
    assert (spdk.name, spdk.targets) == ("spdk", ["spdk"])
    built = work.build("bundle")
    assert built.exit_code == 0, built.output
    sources.list.unlink()
    assert work.build("again").exit_code == 0, "all is kept: nothing is asked for"


def test_a_new_lock_tells_what_changed(work: Work, sources: Sources, made: str) -> None:
    work.lock.write_text(made)
    sources.add_deb("python3.11", version="1.0-2")
    sources.publish()
    result = work.make_lock("--format", "json")
    assert json.loads(result.stdout)["changes"] == ["python3.11 1.0-1 -> 1.0-2"]


def test_what_is_gone_asks_for_a_new_lock(work: Work, sources: Sources, made: str) -> None:
    work.lock.write_text(made)
    (sources.debian / "python3.11_1.0-1_arm64.deb").unlink()
    sources.add_deb("python3.11", version="1.0-2")
    sources.publish()
    result = work.build("bundle")
    assert (result.exit_code, "no longer what the lock names: python3.11 1.0-1" in result.output) == (1, True)
    assert "mfctl image lock --arch arm64" in result.output


def test_a_wheel_that_became_another_is_refused(work: Work, sources: Sources, made: str) -> None:
    work.lock.write_text(made)
    make_wheel(sources.wheels / "one-1.5-cp311-abi3-manylinux_2_28_aarch64.whl", "one", "1.5", {"one.py": b"evil"})
    result = work.build("bundle")
    assert (result.exit_code, "the wheel of one==1.5 that is there is not" in result.output) == (1, True), result.output
    assert "mfctl image lock --arch arm64" in result.output
    (sources.wheels / "one-1.5-cp311-abi3-manylinux_2_28_aarch64.whl").unlink()
    result = work.build("bundle")
    assert (result.exit_code, "there is no wheel any more" in result.output) == (1, True), result.output


def test_a_package_with_another_content_is_refused_by_apt_or_by_us(work: Work, sources: Sources, made: str) -> None:
    work.lock.write_text(made)
    sources.add_deb("libstdc++6", version="1.0-1", depends="libdeep")
    sources.publish()
    result = work.build("bundle")
    assert (result.exit_code, "libstdc++6 1.0-1 as it is fetched has another digest" in result.output) == (1, True)


@pytest.mark.parametrize(("origin", "codename"), [("Debian", "trixie"), ("Others", "bookworm")])
def test_sources_of_another_system_are_not_taken(work: Work, sources: Sources, origin: str, codename: str) -> None:
    sources.publish(origin=origin, codename=codename)
    result = work.make_lock()
    assert (result.exit_code, "have no Debian bookworm for arm64" in result.output) == (1, True), result.output
    assert "--apt-sources" in result.output
    assert not work.lock.exists()


def test_sources_that_nobody_signed_are_not_taken(work: Work, sources: Sources) -> None:
    sources.list.write_text(sources.list.read_text().replace("[trusted=yes] ", ""))
    result = work.make_lock()
    assert (result.exit_code, work.lock.exists()) == (1, False), result.output


def test_a_requirement_that_nothing_meets(work: Work, sources: Sources) -> None:
    for path in sources.wheels.glob("one-*"):
        path.unlink()
    result = work.make_lock()
    assert (result.exit_code, "No matching distribution found for one<2,>=1" in result.output) == (1, True)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_the_committed_locks_are_for_what_the_project_asks_for(arch: str) -> None:
    import tomllib

    from meshfusion.tools.image.lock import TARGETS
    from meshfusion.tools.image.requirements import check_requirements

    text = (ROOT / LOCKS / f"{arch}.json").read_text()
    lock = read_lock(text, arch)
    assert (lock.architecture, lock_text(lock)) == (arch, text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for target in TARGETS:
        check_requirements(lock, project, target)
    assert "://" not in text, "where to get packages is the machine's business"


def small_lock(**changes: Any) -> dict[str, Any]:
    package = {"name": "a", "version": "1:2.0-1~deb12u1+b1", "sha256": SHA, "targets": ["nvmet"]}
    return {
        "format": 1, "architecture": "arm64", "suite": "bookworm", "python": "3.11", "roots": {"nvmet": ["a"]},
        "requires": {"nvmet": []}, "debs": [package], "wheels": [package],
    } | changes  # fmt: skip


def test_a_lock_is_read_as_it_was_written() -> None:
    lock = Lock.model_validate(small_lock())
    assert read_lock(lock_text(lock), "lock") == lock


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        (json.dumps(small_lock(format=2)), "format"),
        (json.dumps(small_lock(debs=[])), "debs"),
        (json.dumps(small_lock(debs=[{"name": "a; rm", "version": "1", "sha256": SHA, "targets": ["nvmet"]}])), "name"),
        (json.dumps(small_lock(debs=[{"name": "a", "version": "1", "sha256": "0", "targets": ["nvmet"]}])), "sha256"),
        (json.dumps(small_lock(architecture="riscv64")), "architecture"),
    ],
)
def test_a_lock_with_mistakes(text: str, message: str) -> None:
    with pytest.raises((BuildError, ConfigProblemsError), match=message):
        read_lock(text, "lock.json")


def test_targets_agree_on_a_package() -> None:
    debs: Any = {"nvmet": {"a": ("1", SHA)}, "spdk": {"a": ("2", SHA)}}
    with pytest.raises(BuildError, match="a is 1 for one target and 2 for another"):
        make_lock("arm64", roots={}, requires={}, debs=debs, wheels={})
