"""``encryption`` in the service's configuration: what is accepted, and what is told before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from meshfusion.dpu.config import examine_service_config, load_service_config, read_config_file
from meshfusion.dpu.encryption.note import EncryptionNote, KeyPlace, read_note, write_note
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.config_problems import ConfigProblemsError
from tests.dpu.encryption.file_luks import key_place, slice_file
from tests.dpu.pool_cases import make_pool

SPDK = "exports: {target: spdk, portals: ['tcp://10.0.0.1:4420'], spdk: {socket: /s, memory: 8GiB, "


@pytest.fixture
def place(tmp_path: Path) -> KeyPlace:
    return key_place(tmp_path)


def written(tmp_path: Path, place: KeyPlace, more: str = "", pool: str = "") -> Path:
    slice_file(tmp_path)
    path = tmp_path / "service.yaml"
    path.write_text(
        f"listen: unix://{tmp_path}/s\n"
        f"pool:\n  path: {tmp_path}/p\n"
        + (pool or f"  create: true\n  size: 300MiB\n  data_path: {tmp_path}/slice\n")
        + f"  encryption: {{header_dir: {place.header_dir}, key_file: {place.key_file}}}\n{more}"
    )
    return path


def problems(path: Path, *, closely: bool = False) -> list[str]:
    look: Callable[[], object] = partial(load_service_config, path)
    if closely:
        look = partial(examine_service_config, path, read_config_file(path))
    with pytest.raises(ConfigProblemsError) as raised:
        look()
    return [str(problem) for problem in raised.value.problems]


def test_where_the_key_is(tmp_path: Path, place: KeyPlace) -> None:
    (served,) = load_service_config(written(tmp_path, place)).served
    assert served.place == place


def test_without(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(f"listen: unix://{tmp_path}/s\npool: {{path: {tmp_path}/p, create: true, size: 300MiB}}\n")
    assert load_service_config(path).served[0].place is None


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, place: KeyPlace) -> None:
    place.key_file.chmod(0o644)
    place.header_dir.rmdir()
    header, key = problems(written(tmp_path, place))
    assert f"pool.encryption.header_dir = '{place.header_dir}': is no directory" in header
    assert f"mkdir -m 700 {place.header_dir}" in header
    assert f"pool.encryption.key_file = '{place.key_file}': has the mode 0644" in key


def test_a_pool_in_its_directory_cannot_be_made_encrypted(tmp_path: Path, place: KeyPlace) -> None:
    (problem,) = problems(written(tmp_path, place, pool="  create: true\n  size: 300MiB\n"))
    assert "pool.data_path: is needed with encryption" in problem


@pytest.mark.parametrize("named", ["bdev: nvme0n1", "bdevs: {0: nvme0n1}"])
def test_what_spdk_has_already_is_not_encrypted(tmp_path: Path, place: KeyPlace, named: str) -> None:
    (problem,) = problems(written(tmp_path, place, f"{SPDK}{named}}}}}\n"))
    assert f"exports.spdk.{named.split(':')[0]} = " in problem
    assert "names what SPDK has already, beside encryption" in problem


def test_an_aio_bdev_of_it_is(tmp_path: Path, place: KeyPlace) -> None:
    load_service_config(written(tmp_path, place, f"{SPDK}cores: 1}}}}\n"))


def test_of_several_pools_likewise(tmp_path: Path, place: KeyPlace) -> None:
    slice_file(tmp_path)
    path = tmp_path / "service.yaml"
    path.write_text(
        f"listen: unix://{tmp_path}/s\naudit: {{path: {tmp_path}/audit.log}}\n{SPDK}cores: 1}}}}\n"
        f"pools:\n  red:\n    tenants: [red]\n    bdevs: {{0: n}}\n    pool: {{path: {tmp_path}/p, create: true, size: "
        f"300MiB, data_path: {tmp_path}/slice, encryption: {{header_dir: {place.header_dir}, key_file: "
        f"{place.key_file}}}}}\n"
    )
    (problem,) = problems(path)
    assert "pools.red.bdevs = {0: 'n'}: names what SPDK has already" in problem


def test_a_pool_that_is_not_encrypted_is_told_by_a_check(tmp_path: Path, place: KeyPlace) -> None:
    make_pool(tmp_path / "p")
    (problem,) = problems(written(tmp_path, place, pool=" \n"), closely=True)
    assert "pool.encryption" in problem
    assert "was made without" in problem


def test_an_encrypted_pool_without_is_told_by_a_check(tmp_path: Path, place: KeyPlace) -> None:
    make_pool(tmp_path / "p")
    write_note(PoolLayout(tmp_path / "p"), EncryptionNote(place, ()))
    path = tmp_path / "service.yaml"
    path.write_text(f"listen: unix://{tmp_path}/s\npool: {{path: {tmp_path}/p}}\n")
    (problem,) = problems(path, closely=True)
    assert f"is encrypted, with its headers in {place.header_dir}" in problem
    assert read_note(PoolLayout(tmp_path / "p")) is not None
