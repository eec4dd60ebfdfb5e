"""Whether a target still lets a host reach a pool: asked before the pool's index is made anew."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu.config_exports import ExportsConfig
from meshfusion.dpu.export import opening
from meshfusion.dpu.export.actual import Actual, ActualSubsystem, AllowedHost, Connection
from meshfusion.dpu.export.desired import Export, Namespace
from meshfusion.dpu.export.plan import nqn_prefix_of
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.errors import ConfigError

POOL = uuid.UUID(int=7)
PREFIX = nqn_prefix_of(POOL)
NAME = f"nvmet, NQNs {PREFIX}"
CONFIG = ExportsConfig(target="nvmet", portals=["rdma://10.0.0.1:4420"])
OURS = ActualSubsystem(f"{PREFIX}:one", "s")


def asked(monkeypatch: pytest.MonkeyPatch, path: Path, *there: ActualSubsystem, name: str = NAME) -> bool:
    class Target:
        def read(self, desired: Export) -> Actual:
            return there

    monkeypatch.setattr(opening, "_nvmet", lambda desired: Target())
    return opening.has_hosts(CONFIG, POOL, name, PoolLayout(path))


def test_a_target_without_our_subsystems_has_no_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ActualSubsystem("nqn.2014-08.org.nvmexpress:other", "s", allow_any_host=True)
    assert not asked(monkeypatch, tmp_path)
    assert not asked(monkeypatch, tmp_path, other, OURS), "another's, and an empty one of ours"


@pytest.mark.parametrize(
    "there",
    [
        replace(OURS, hosts=frozenset({AllowedHost("nqn.host", "0" * 16)})),
        replace(OURS, connections=frozenset({Connection("nqn.host", live=False)})),
        replace(OURS, allow_any_host=True),
        replace(OURS, pending="removing it"),
        replace(OURS, namespaces=frozenset({Namespace(1, POOL, POOL.hex, "/dev/x")})),
    ],
    ids=("host", "connection", "any host", "pending", "who knows who is connected"),
)
def test_what_could_still_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: ActualSubsystem) -> None:
    assert asked(monkeypatch, tmp_path, there)


def test_another_target_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="was exported as spdk at /s, NQNs x; this configuration means nvmet"):
        asked(monkeypatch, tmp_path, name="spdk at /s, NQNs x")
