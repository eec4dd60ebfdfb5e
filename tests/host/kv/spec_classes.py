"""Every KV spec class of the installed vLLM: found in its source text first, so that none hides in a module that
nothing imports, then imported."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

ROOT = "KVCacheSpec"


@functools.cache
def spec_classes() -> dict[str, type[Any]]:
    """By qualified name, the root included: everything derived from it in the source, and at run time."""
    for module in sorted(_modules_with_specs()):
        importlib.import_module(module)
    root = importlib.import_module("vllm.v1.kv_cache_interface").KVCacheSpec
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in (root, *_subclasses(root))}


@functools.cache
def source_class_names() -> frozenset[str]:
    """The plain names of the classes that are derived from the root by the source text."""
    names = {ROOT}
    statements = [(node.name, bases) for _, node, bases in _class_statements()]
    while True:
        more = {name for name, bases in statements if bases & names} - names
        if not more:
            return frozenset(names)
        names |= more


def _modules_with_specs() -> set[str]:
    names = source_class_names()
    return {module for module, node, bases in _class_statements() if node.name in names and bases & names}


@functools.cache
def _class_statements() -> tuple[tuple[str, ast.ClassDef, frozenset[str]], ...]:
    """Class statements at any depth with a base whose name ends in Spec: module, statement, names of the bases."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    statements = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Spec" not in text:
            continue
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases = frozenset(ast.unparse(base).rpartition(".")[2] for base in node.bases)
                if any(base.endswith(("Spec", "Specs")) for base in bases):
                    statements.append((module, node, bases))
    return tuple(statements)


def _subclasses(cls: type[Any]) -> list[type[Any]]:
    return [found for child in cls.__subclasses__() for found in (child, *_subclasses(child))]
