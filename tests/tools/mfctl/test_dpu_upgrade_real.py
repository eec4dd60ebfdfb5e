"""The service itself is upgraded, rolled back, and given back: chunks that were written before are hits after."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.image.slots.card_rig import Card, make_programs
from tests.dpu.image.slots.tiny_bundle import Signer, make_bundle, real
from tests.dpu.pool_cases import Holder, key

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[3]
BROKEN = b"#!/bin/sh\necho 'no such key: pool.shape' >&2\nexit 2\n"


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    monkeypatch.setenv("PATH", str(make_programs(tmp_path)), prepend=":")
    with Card(tmp_path, "dpu-1", ROOT / ".typing") as made:
        made.configure(
            f"listen: unix://{tmp_path}/service\n"
            f"pool: {{path: {tmp_path}/pool, create: true, size: 8MiB, segment_size: 1MiB}}\n"
            f"telemetry: {{listen: '127.0.0.1:{made.port}', probe_interval_s: 1}}\n"
        )
        yield made


def _upgrade(bundle: Path, signer: Signer, service: str = "") -> Result:
    words = ["dpu", "upgrade", "root@dpu-1", "--bundle", str(bundle), "--key", str(signer.path), "--yes"]
    words += ["--format", "json", "--steady", "3", *(("--service", service) if service else ())]
    return CliRunner().invoke(mfctl, words, prog_name="mfctl")


def _status() -> dict[str, Any]:
    result = CliRunner().invoke(mfctl, ["dpu", "status", "root@dpu-1", "--format", "json"], prog_name="mfctl")
    (entry,) = json.loads(result.stdout)["cards"]
    assert isinstance(entry, dict)
    return entry


def _has(address: str, number: int) -> bool:
    client = GrpcChunkService(address)
    try:
        return client.get_chunk(key(number), deadline_s=10.0) is not None
    finally:
        client.close()


def test_chunks_outlive_upgrades_rollbacks_and_releases_that_are_no_good(card: Card, tmp_path: Path) -> None:
    signer, address = Signer.make(tmp_path), f"unix://{tmp_path}/service"
    bundles = {version: make_bundle(tmp_path / version, signer, version, real(version)) for version in ("9.1", "9.2")}
    broken = make_bundle(tmp_path / "broken", signer, "9.3", real("9.3") | {"usr/bin/meshfusion": BROKEN})

    first = _upgrade(bundles["9.1"], signer)
    assert first.exit_code == 0, first.output
    client = GrpcChunkService(address)
    holder = Holder(client)
    assert holder.put(1)
    os.close(holder.lock)
    client.close()

    second = _upgrade(bundles["9.2"], signer, address)
    assert second.exit_code == 0, second.output
    assert json.loads(second.stdout)["cards"][0]["notes"] == []
    assert (_status()["version"], _status()["committed"]) == ("9.2", "b")
    assert _has(address, 1)

    third = _upgrade(broken, signer, address)
    assert third.exit_code == 1
    outcome = json.loads(third.stdout)["cards"][0]
    assert (outcome["state"], outcome["problem"]) == ("rolled back", "the new service has failed")
    assert (_status()["version"], _status()["is_ready"]) == ("9.2", True)
    assert _has(address, 1)

    again = _upgrade(bundles["9.1"], signer)
    assert again.exit_code == 0, "its slot was that of the broken one"
    back = CliRunner().invoke(mfctl, ["dpu", "rollback", "root@dpu-1", "--yes", "--steady", "3"], prog_name="mfctl")
    assert back.exit_code == 0, back.output
    assert (_status()["version"], _has(address, 1)) == ("9.2", True)
