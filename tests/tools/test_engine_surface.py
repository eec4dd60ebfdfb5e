"""Reading an engine's source: a small one made here, and the installed one against what was recorded of it."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.host.kv.identity import installed_engine_version
from meshfusion.host.kv.versions import SUPPORTED_MINORS
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.engine_surface import (
    CONNECTOR_API,
    MANAGERS,
    SPEC_CLASSES,
    SPEC_FIELDS,
    STRUCTURES,
    VALUES,
    Difference,
    Surface,
    compare,
    read_folder,
    read_surface,
    read_wheel,
)
from meshfusion.tools.known_surface import examine_wheel, recorded_surface, report

INTERFACE = '''
class KVCacheSpec:
    """class NotAClassSpec(KVCacheSpec): in a docstring"""
    block_size: int
    @property
    def prefix_cacheable(self) -> bool:
        """Yes."""
        return True

class AttentionSpec(KVCacheSpec): ...
class FullAttentionSpec(AttentionSpec):
    sliding_window: int | None = None
class OtherSpec(Unrelated): ...
class KVCacheLayout(Enum):
    LBHNC = (0, 1, 2, 3, 4)
class KVCacheTensor:
    size: int  # bytes
'''
PLUGIN = "from x import interface\nclass NewSpec(interface.FullAttentionSpec):\n    gap: int = 3\n"
MANAGER = """
class SingleTypeKVCacheManager(ABC):
    def get_num_skipped_tokens(self, n):
        return 0
"""
CONNECTOR = """
class KVConnectorBase_V1(ABC):
    @abstractmethod
    def start_load_kv(self, context: "C", **more: Any) -> None: ...
    @property
    def role(self): ...
"""
CONFIG = "CacheDType = Literal['auto', 'fp8']\n"
MODULES = {
    "vllm/v1/kv_cache_interface.py": INTERFACE, "vllm/models/new/__init__.py": PLUGIN,
    "vllm/v1/core/single_type_kv_cache_manager.py": MANAGER, "vllm/base.py": CONNECTOR, "vllm/config/cache.py": CONFIG,
}  # fmt: skip


def sources(**changed: str) -> Iterator[tuple[str, str]]:
    for path, text in MODULES.items():
        yield path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), changed.get(path, text)


def write_wheel(path: Path, modules: dict[str, str], *, metadata: str = "Name: vllm\nVersion: 0.99.1\n") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm-0.99.1.dist-info/METADATA", metadata)
        for name, text in modules.items():
            archive.writestr(name, text)
    return path


def test_what_is_read(tmp_path: Path) -> None:
    surface = read_wheel(write_wheel(tmp_path / "vllm-0.99.1-py3-none-any.whl", MODULES))
    assert surface.version == "0.99.1"
    assert surface.sections[SPEC_CLASSES] == {
        "vllm.v1.kv_cache_interface.KVCacheSpec": "()",
        "vllm.v1.kv_cache_interface.AttentionSpec": "(KVCacheSpec)",
        "vllm.v1.kv_cache_interface.FullAttentionSpec": "(AttentionSpec)",
        "vllm.models.new.NewSpec": "(interface.FullAttentionSpec)",
    }
    assert surface.sections[SPEC_FIELDS] == {
        "vllm.v1.kv_cache_interface.KVCacheSpec.block_size": "int",
        "vllm.v1.kv_cache_interface.FullAttentionSpec.sliding_window": "int | None = None",
        "vllm.models.new.NewSpec.gap": "int = 3",
    }
    assert surface.sections[CONNECTOR_API] == {
        "KVConnectorBase_V1.start_load_kv": "@abstractmethod (self, context: 'C', **more: Any) -> None",
        "KVConnectorBase_V1.role": "@property (self)",
    }
    assert surface.sections[STRUCTURES] == {"KVCacheTensor.size": "int"}
    assert surface.sections[VALUES] == {
        "KVCacheLayout.LBHNC": "(0, 1, 2, 3, 4)", "CacheDType.auto": "literal", "CacheDType.fp8": "literal",
    }  # fmt: skip


def test_what_has_changed() -> None:
    path = "vllm/v1/kv_cache_interface.py"
    changed = INTERFACE.replace("block_size: int", "block_size: int = 16").replace("LBHNC", "LHBNC")
    before, after = read_surface("1", sources()), read_surface("2", sources(**{path: changed}))
    assert compare(before, before) == ()
    assert compare(before, after) == (
        Difference(SPEC_FIELDS, "vllm.v1.kv_cache_interface.KVCacheSpec.block_size", "changed", "int", "int = 16"),
        Difference(VALUES, "KVCacheLayout.LBHNC", "gone", "(0, 1, 2, 3, 4)", ""),
        Difference(VALUES, "KVCacheLayout.LHBNC", "new", "", "(0, 1, 2, 3, 4)"),
    )


@pytest.mark.parametrize(
    ("text", "is_change"), [("return 0", False), ("return n", True), ("return 0  # as ever", False)]
)
def test_of_rules_only_the_statements_count(text: str, is_change: bool) -> None:
    path = "vllm/v1/core/single_type_kv_cache_manager.py"
    changed = MANAGER.replace("return 0", f'"""Said anew."""\n        {text}')
    found = compare(read_surface("1", sources()), read_surface("2", sources(**{path: changed})))
    assert [item.section for item in found] == ([MANAGERS] if is_change else [])


def test_a_surface_survives_its_file() -> None:
    surface = read_surface("1", sources())
    assert Surface.from_json(surface.to_json()) == surface


@pytest.mark.parametrize(
    ("modules", "metadata", "expected"),
    [
        ({"vllm/a.py": "x = 1"}, "Version: 1.0\n", "has nothing of: spec classes"),
        ({**MODULES, "vllm/b.py": "class ASpec(KVCacheSpec):"}, "Version: 1.0\n", "cannot be read by this Python"),
        (MODULES, "Name: vllm\n", "has no metadata"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, modules: dict[str, str], metadata: str, expected: str) -> None:
    with pytest.raises(MeshFusionError, match=expected):
        read_wheel(write_wheel(tmp_path / "a.whl", modules, metadata=metadata))


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_text("no")
    with pytest.raises(MeshFusionError, match="is not a wheel"):
        read_wheel(tmp_path / "a.whl")


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(MeshFusionError, match="is not a file"):
        read_wheel(Path("/dev/zero"))


def test_an_entry_that_unpacks_to_more_than_a_module_is_refused_unread(tmp_path: Path) -> None:
    long = "# " + "-" * (17 << 20)
    with pytest.raises(MeshFusionError, match=r"has vllm/long\.py of 17825794 bytes"):
        read_wheel(write_wheel(tmp_path / "a.whl", {**MODULES, "vllm/long.py": long}))


def test_source_nested_deeper_than_the_parser_goes_is_refused(tmp_path: Path) -> None:
    deep = "class DeepSpec(KVCacheSpec): ...\nx = " + "-" * 200_000 + "1\n"
    with pytest.raises(MeshFusionError, match="cannot be read by this Python"):
        read_wheel(write_wheel(tmp_path / "a.whl", {**MODULES, "vllm/deep.py": deep}))


@pytest.mark.parametrize(
    ("central_at", "local_at", "value", "expected"),
    [(8, 6, b"\x01\x00", "is encrypted"), (10, 8, b"\x4d\x00", "compression method is not supported")],
    ids=["encrypted", "compressed-otherwise"],
)
def test_entries_that_cannot_be_unpacked_are_named(
    tmp_path: Path, central_at: int, local_at: int, value: bytes, expected: str
) -> None:
    """Fields of the headers of all entries: APPNOTE.TXT of the zip format, 4.3.7 and 4.3.12."""
    wheel = write_wheel(tmp_path / "a.whl", MODULES)
    data = bytearray(wheel.read_bytes())
    for signature, field_at in ((b"PK\x01\x02", central_at), (b"PK\x03\x04", local_at)):
        at = -1
        while (at := data.find(signature, at + 1)) >= 0:
            data[at + field_at : at + field_at + 2] = value
    wheel.write_bytes(data)
    with pytest.raises(MeshFusionError, match=rf"METADATA, which cannot be unpacked .*{expected}"):
        read_wheel(wheel)


def test_a_class_without_a_kind_is_told(tmp_path: Path) -> None:
    found = examine_wheel(write_wheel(tmp_path / "a.whl", MODULES))
    assert found.unclassified == ("vllm.models.new.NewSpec",)
    assert not found.is_known
    assert found.spec_classes["vllm.v1.kv_cache_interface.FullAttentionSpec"] == "full_attention"
    assert found.compared_with.startswith(SUPPORTED_MINORS[-1]), "another version is compared with the newest"


@pytest.mark.parametrize("minor", SUPPORTED_MINORS)
def test_every_supported_version_is_recorded_and_known(minor: str) -> None:
    surface = recorded_surface(minor)
    assert surface.version.startswith(f"{minor}.")
    assert report(surface).is_known


def test_the_installed_engine_is_what_was_recorded() -> None:
    """Fails on a new vLLM: judge what is new, then record it (see tools/known_surface.py)."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    result = report(read_folder(Path(found.origin).parent, installed_engine_version()))
    assert result.differences == ()
    assert result.unclassified == ()
