"""What docs/tenants.md shows are configurations that the service takes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from meshfusion.dpu.config import PoolConfig, load_service_config

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "tenants.md"


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    block, _ = _blocks()
    for name in ("red", "lab"):
        (tmp_path / f"dev-{name}").touch()
        block = block.replace(f"/dev/vg0/{name}", f"{tmp_path}/dev-{name}")
    block = block.replace("/var/lib/meshfusion", str(tmp_path)).replace("/run/meshfusion", str(tmp_path))
    block = block.replace("/var/log/meshfusion", str(tmp_path))
    file = tmp_path / "service.yaml"
    file.write_text(block)
    red, lab = load_service_config(file).served
    assert (red.tenants, lab.tenants) == (frozenset({"red"}), frozenset({"blue", "green"}))
    assert yaml.safe_load(block)["pools"].keys() == {"red", "lab"}


def test_the_example_of_encryption_is_that_of_a_pool() -> None:
    _, block = _blocks()
    pool = PoolConfig.model_validate(yaml.safe_load(block)["pools"]["red"]["pool"])
    assert pool.encryption is not None
    assert pool.encryption.place.key_file == Path("/run/keys/red")


def _blocks() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
