"""``mfctl jbof remove`` on a pool that was exported and that nobody serves: its target is asked, or nothing is done."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from meshfusion.dpu.drive_list import read_drive_list
from meshfusion.dpu.export import opening
from meshfusion.dpu.export.actual import Actual, ActualSubsystem
from meshfusion.dpu.export.desired import Export, Namespace
from meshfusion.dpu.export.errors import TargetUnreachableError
from meshfusion.dpu.export.plan import nqn_prefix_of
from tests.tools.mfctl.test_mfctl import run

EXPORTS = "exports: {target: nvmet, portals: ['rdma://10.0.0.1:4420'], authenticate: false}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of three drives, exported once."""
    path = tmp_path / "pool"
    options = ("--size", "6MiB", "--segment-size", "1MiB", "--drives", "3")
    assert run("pool", "create", str(path), *options).exit_code == 0
    (path / "exported").write_text(f"nvmet, NQNs {prefix_of(path)}\n")
    return path


@pytest.fixture
def config(tmp_path: Path, path: Path) -> Path:
    file = tmp_path / "service.yaml"
    file.write_text(f"listen: unix://{tmp_path}/s\npool: {{path: {path}}}\n{EXPORTS}")
    return file


def prefix_of(path: Path) -> str:
    listed = read_drive_list(path)
    assert listed is not None
    return nqn_prefix_of(uuid.UUID(listed.pool_uuid))


def numbers(path: Path) -> list[int]:
    rows = json.loads(run("jbof", "drives", str(path), "--format", "json").stdout)["drives"]
    return [row["number"] for row in rows]


def target_shows(monkeypatch: pytest.MonkeyPatch, read: Callable[[], Actual]) -> None:
    class Target:
        def read(self, desired: Export) -> Actual:
            return read()

    monkeypatch.setattr(opening, "_nvmet", lambda desired: Target())


def refused(path: Path, *options: str) -> str:
    """What is told; nothing has changed."""
    before = {file: file.read_bytes() for file in (path / "drives", path / "exported")}
    result = run("jbof", "remove", str(path), "1", "--yes", *options)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert numbers(path) == [0, 1, 2]
    assert (path / "data.1").exists()
    assert {file: file.read_bytes() for file in before} == before
    return result.stderr


def test_without_its_configuration_nobody_can_say_who_reaches_it(path: Path) -> None:
    told = refused(path)
    assert "was exported (nvmet, NQNs " in told
    assert "mfctl jbof remove --config FILE" in told


def test_a_drive_that_no_host_reaches_is_removed(path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = ActualSubsystem("nqn.2026-11.x:other", "s", allow_any_host=True)
    target_shows(monkeypatch, lambda: (stranger, ActualSubsystem(f"{prefix_of(path)}:one", "s")))
    result = run("jbof", "remove", str(path), "1", "--yes", "--config", str(config))
    assert result.exit_code == 0, result.stderr
    assert numbers(path) == [0, 2]
    assert not (path / "data.1").exists()


def test_while_the_target_lets_a_host_in_nothing_is_removed(
    path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever drive it shows: the host may write to any that the pool had when it came."""
    shown = Namespace(1, uuid.UUID(int=1), "1".zfill(32), "/d/0")
    ours = ActualSubsystem(f"{prefix_of(path)}:one", "s", namespaces=frozenset({shown}))
    target_shows(monkeypatch, lambda: (ours,))
    assert "still serves hosts that may write to" in refused(path, "--config", str(config))


def test_a_target_that_does_not_answer_has_confirmed_nothing(
    path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Actual:
        raise TargetUnreachableError("the target does not answer", next_step="start it")

    target_shows(monkeypatch, read)
    assert "the target does not answer" in refused(path, "--config", str(config))


def test_a_configuration_without_exports_names_no_target(path: Path, config: Path) -> None:
    config.write_text(config.read_text().replace(EXPORTS, ""))
    assert "has no exports, so it names no target" in refused(path, "--config", str(config))


def test_another_target_is_not_asked(path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target_shows(monkeypatch, lambda: ())
    (path / "exported").write_text("spdk at /run/spdk.sock, NQNs x\n")
    told = refused(path, "--config", str(config))
    assert "was exported as spdk at /run/spdk.sock, NQNs x; this configuration means nvmet" in told


def test_a_configuration_that_is_not_there(path: Path, tmp_path: Path) -> None:
    assert "none.yaml" in refused(path, "--config", str(tmp_path / "none.yaml"))


def test_the_configuration_of_other_pools(path: Path, tmp_path: Path, config: Path) -> None:
    for name in ("red", "blue"):
        assert run("pool", "create", f"{tmp_path}/{name}", "--size", "6MiB", "--segment-size", "1MiB").exit_code == 0
    pools = "".join(f"  {name}: {{pool: {{path: {tmp_path}/{name}}}, tenants: [{name}]}}\n" for name in ("red", "blue"))
    config.write_text(f"listen: unix://{tmp_path}/s\naudit: {{path: {tmp_path}/audit}}\n{EXPORTS}pools:\n{pools}")
    assert f"{path} is no pool of {config}" in refused(path, "--config", str(config))
