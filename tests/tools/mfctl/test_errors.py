"""Every error tells what to do next, and ends with the exit code that is documented for it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfusion.jbof import errors
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools import generate_docs
from meshfusion.tools.mfctl.command_tree import leaf_commands
from meshfusion.tools.mfctl.exit_codes import (
    BY_ERROR,
    EXIT_CODES,
    EXIT_FAILURE,
    exit_code,
    exit_codes_help,
    exit_codes_table,
)
from meshfusion.tools.mfctl.main import mfctl

ROOT = Path(generate_docs.__file__).resolve().parent.parent
UNITS = ("jbof", "dpu", "host", "tools")


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for unit in UNITS:
        for path in sorted((ROOT / unit).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path, ast.parse(path.read_bytes())


SOURCES = tuple(sources())


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def error_classes() -> dict[str, ast.ClassDef]:
    """All that are MeshFusionErrors, by the names of classes: found in the source, so that none need be imported."""
    classes = {node.name: node for _, tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = {"MeshFusionError": classes["MeshFusionError"]}
    while True:
        more = {
            name: node for name, node in classes.items()
            if name not in found and any(_name(base) in found for base in node.bases)
        }  # fmt: skip
        if not more:
            return found
        found |= more


CLASSES = error_classes()


def _own_steps(node: ast.ClassDef) -> bool:
    """Does it take other arguments, and make the next step itself?"""
    return any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)


def _made_by(name: str) -> str:
    """The nearest class that has a constructor of its own."""
    while not _own_steps(CLASSES[name]):
        name = next(_name(base) for base in CLASSES[name].bases if _name(base) in CLASSES)
    return name


def _is_blank(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and not str(value.value).strip())


def test_there_are_errors_to_look_at() -> None:
    assert {"ConfigError", "MediaError", "ServiceUnavailableError", "ConfigProblemsError"} <= CLASSES.keys()
    assert len(CLASSES) > 15


def test_every_error_that_is_made_has_a_next_step() -> None:
    """Where it is made with the common constructor, there; else where its own class calls that."""
    made = 0
    for path, tree in SOURCES:
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = _name(call.func)
            if name not in CLASSES or _made_by(name) != "MeshFusionError":
                continue
            made += 1
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            passed_on = None in given  # **fields
            assert passed_on or not _is_blank(given.get("next_step")), f"{path}:{call.lineno}: {name} says no next step"
    assert made > 300


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "MeshFusionError" and _own_steps(CLASSES[name])])
def test_an_error_with_a_constructor_of_its_own_has_a_next_step(name: str) -> None:
    (init,) = (e for e in CLASSES[name].body if isinstance(e, ast.FunctionDef) and e.name == "__init__")
    calls = [
        call for call in ast.walk(init)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"
    ]  # fmt: skip
    assert calls, "it makes what it is"
    for call in calls:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        positional = len(call.args) > 1  # of a class between, which has its own order
        assert positional or None in given or not _is_blank(given.get("next_step")), name


def test_wrong_usage_of_any_command_has_a_next_step() -> None:
    for name, command in leaf_commands(mfctl, "mfctl"):
        if command.context_settings.get("ignore_unknown_options"):
            continue  # what it does not know is for the command that it runs
        line = [*name.split()[1:], "--no-such-option"]
        table = CliRunner().invoke(mfctl, line)
        assert table.exit_code == 2, name
        assert f"Try '{name} --help' for help." in table.stderr or "Try 'mfctl" in table.stderr, name
        found = CliRunner().invoke(mfctl, [*line, "--format", "json"])
        error = json.loads(found.stderr)["error"]
        assert error["exit_code"] == found.exit_code == 2
        assert error["next_step"]


def test_the_codes_are_told_in_the_help_and_the_documents() -> None:
    document, help_text = generate_docs.generate()["mfctl.md"], CliRunner().invoke(mfctl, ["--help"]).output
    assert exit_codes_table() in document
    for code, text in EXIT_CODES.items():
        assert f"{code}  {text.split(',')[0][:40]}" in help_text
        assert f"| {code} | {text} |" in document
        assert f"{code}  {text}\n" in exit_codes_help()


def test_each_kind_of_error_ends_as_it_is_documented() -> None:
    codes = dict(BY_ERROR)
    for kind in (each for each in vars(errors).values() if isinstance(each, type)):
        if not issubclass(kind, MeshFusionError):
            continue
        expected = next((codes[base] for base in kind.__mro__ if base in codes), EXIT_FAILURE)
        assert exit_code(kind("x", next_step="y")) == expected
        assert expected in EXIT_CODES
    assert exit_code(errors.ServiceDrainingError("x", next_step="y")) == 5, "as what it is a kind of"


def test_no_command_ends_with_another_code() -> None:
    """Numbers in the commands' own exits are those of the table."""
    for path, tree in SOURCES:
        if path.parent.name != "mfctl":
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if _name(call.func) in ("Exit", "exit") and call.args and isinstance(call.args[0], ast.Constant):
                assert call.args[0].value in EXIT_CODES, f"{path}:{call.lineno}"
