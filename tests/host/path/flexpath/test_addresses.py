"""Configured addresses become paths with their own connections and weights."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from meshfusion.host.path.flexpath import addresses
from meshfusion.host.path.flexpath.addresses import PathAddress, path_specs
from meshfusion.host.path.flexpath.link import CurrentKey
from meshfusion.host.path.flexpath.locality import Distance
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.key_scope import KeyScope
from tests.host.path.flexpath.test_locality import GPU, GPU_WAY, tree

NQN, HOST, ID = "nqn.2026-01.com.example:pool", "nqn.2026-01.com.example:host", uuid.UUID(int=7)
NEAR = PathAddress("192.0.2.1", 4420, "nic0", "192.0.2.100")
FAR = PathAddress("192.0.2.2", 4421, "br0")


def test_each_path_is_opened_at_its_portal_from_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(addresses, "connect", lambda *args, **options: calls.append((args, options)))

    def on_event(_: object) -> None: ...

    specs = path_specs([NEAR, FAR], NQN, HOST, ID, io_queue_count=2, key_scope=KeyScope.COMMAND)
    assert [(spec.name, spec.weight) for spec in specs] == [
        ("nic0 to 192.0.2.1 port 4420", 1.0),
        ("br0 to 192.0.2.2 port 4421", 1.0),
    ]
    for spec in specs:
        spec.open(on_event)
    assert [args for args, _ in calls] == [("192.0.2.1", 4420, NQN, HOST, ID), ("192.0.2.2", 4421, NQN, HOST, ID)]
    assert [options["source_address"] for _, options in calls] == ["192.0.2.100", None]
    assert all(options["on_event"] is on_event and options["io_queue_count"] == 2 for _, options in calls)
    assert all(options["key_scope"] is KeyScope.COMMAND for _, options in calls)
    assert all(options["loss_timeout_s"] >= 86400 for _, options in calls)


def test_a_path_is_opened_with_the_key_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Secret | None] = []
    monkeypatch.setattr(addresses, "connect", lambda *args, **options: keys.append(options["host_key"]))
    key, new = CurrentKey(Secret(bytes(32))), Secret(bytes(range(32)))
    (spec,) = path_specs([NEAR], NQN, HOST, ID, key=key)
    spec.open(lambda event: None)
    former, key.secret = key.secret, new
    spec.open(lambda event: None)
    assert keys == [former, new]


def test_weights_come_from_the_distance_to_the_gpu(tmp_path: Path) -> None:
    root = tree(tmp_path, GPU_WAY, "pci0000:ae/0000:ae:00.0/0000:af:00.0", 0, 1)
    (root / "class/net/br0").mkdir()
    specs = path_specs([NEAR, FAR], NQN, HOST, ID, gpu_pci_address=GPU, sysfs=root)
    assert [spec.weight for spec in specs] == [Distance.SYSTEM.weight, Distance.UNKNOWN.weight]
    with pytest.raises(ConfigError, match="nic7"):
        path_specs([NEAR, PathAddress("192.0.2.3", 4420, "nic7")], NQN, HOST, ID, gpu_pci_address=GPU, sysfs=root)
