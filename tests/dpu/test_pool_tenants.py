"""A pool does not become another tenant's by a changed line of the configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_rebuild import rebuild_index
from meshfusion.jbof.errors import ConfigError, FormatError
from tests.dpu.pool_cases import Holder, make_pool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_pool(tmp_path / "pool")
    return tmp_path / "pool"


def serve_once(path: Path, *tenants: str) -> None:
    Pool.open(path, tenants=frozenset(tenants)).close()


def test_data_of_one_tenant_is_not_shown_to_another(path: Path) -> None:
    serve_once(path, "red")
    with pytest.raises(ConfigError) as refused:
        serve_once(path, "blue")
    assert "holds data of red, which blue could read" in refused.value.message
    assert f"rm -r {path}" in refused.value.next_step
    assert "tenants = blue" in refused.value.message
    serve_once(path, "red")


def test_sharing_is_said_by_naming_all(path: Path) -> None:
    serve_once(path, "red")
    serve_once(path, "red", "blue")
    serve_once(path, "blue")  # red leaves, what it shared stays
    with pytest.raises(ConfigError, match="holds data of red, which green"):
        serve_once(path, "blue", "green")
    serve_once(path, "red", "blue", "green")


def test_a_pool_from_before_tenants_is_the_default_ones(path: Path) -> None:
    serve_once(path, "default")
    assert not (path / "tenants").exists()
    with pytest.raises(ConfigError, match="holds data of default"):
        serve_once(path, "red")
    serve_once(path, "default")
    serve_once(path, "default", "red")


def test_a_refusal_leaves_the_pool_as_it_was(path: Path) -> None:
    serve_once(path, "red")
    before = (path / "tenants").read_bytes()
    for _ in range(2):
        with pytest.raises(ConfigError):
            serve_once(path, "blue")
    assert (path / "tenants").read_bytes() == before == b"red\n"


def test_a_note_that_cannot_be_read_admits_nobody(path: Path) -> None:
    serve_once(path, "red")
    for damage in (b"", b"re", b"\xff\n", "r\u00e9d\n".encode()):
        (path / "tenants").write_bytes(damage)
        with pytest.raises(FormatError, match="tenants is damaged"):
            serve_once(path, "red")


def test_an_index_made_anew_changes_nothing_of_that(path: Path) -> None:
    """The medium does not tell whose a chunk is; the pool does."""
    with Pool.open(path, tenants=frozenset({"red"})) as pool, Holder(pool, tenant="red") as holder:
        assert holder.put(0)
    shutil.rmtree(path / "index")
    rebuild_index(path)
    with pytest.raises(ConfigError, match="holds data of red"):
        serve_once(path, "blue")
    with Pool.open(path, tenants=frozenset({"red"})) as pool, Holder(pool, tenant="red") as holder:
        assert holder.match(0).chunk_count == 1
    (path / "tenants").unlink()
    shutil.rmtree(path / "index")
    rebuild_index(path)
    with pytest.raises(ConfigError, match="holds data of default"):
        serve_once(path, "red")
