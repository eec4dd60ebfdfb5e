"""Reading a YAML file so that every problem can name its line. Nothing here knows a schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshfusion.jbof.errors import ConfigError

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """``data`` as :func:`yaml.safe_load` gives it; ``lines`` of every key and item, counted from 1."""

    data: Any
    lines: dict[FieldPath, int] = field(default_factory=dict)
    duplicates: tuple[FieldPath, ...] = ()

    def line_of(self, path: FieldPath) -> int | None:
        """The line of ``path``, or of the nearest thing around it that stands in the file."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return None


def read_yaml(path: Path) -> YamlDocument:
    """Read a file. Raises :class:`~meshfusion.jbof.errors.ConfigError` when it is unreadable or no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file", next_step="Correct the path; `mfctl config example` prints a file to start from."
        ) from None
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"{path}: not UTF-8 text ({e.reason} at byte {e.start})", next_step="Save it as UTF-8."
        ) from e
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}", next_step="Check the path and its permissions.") from e
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse ``text``; ``name`` is what messages call it."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as e:
        where = f"{name}, line {text.count(chr(10), 0, e.position) + 1}"
        raise ConfigError(
            f"{where}: not valid YAML: the character U+{ord(text[e.position]):04X} is not allowed",
            next_step="Remove it, or write it as an escape between double quotes.",
        ) from e
    try:
        node = loader.get_single_node()
        if node is None:
            return YamlDocument(None)
        lines: dict[FieldPath, int] = {}
        duplicates: list[FieldPath] = []
        _walk(node, (), lines, duplicates, set())
        return YamlDocument(loader.construct_document(node), lines, tuple(duplicates))
    except yaml.MarkedYAMLError as e:
        if _is_meant_as_json(text, name):
            raise _json_error(text, name) from e
        mark = e.problem_mark or e.context_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise ConfigError(
            f"{where}: not valid YAML: {e.problem or e.context}",
            next_step="Correct the line: mappings are `key: value`, indented with spaces, never with tabs.",
        ) from e
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as e:
        # ValueError, TypeError: values that look like a date or a key but cannot be one.
        raise ConfigError(f"{name}: not valid YAML: {e}", next_step="Correct the file.") from e
    finally:
        loader.dispose()


def _is_meant_as_json(text: str, name: str) -> bool:
    return name.endswith(".json") or (text.lstrip().startswith("{") and not name.endswith((".yaml", ".yml")))


def _json_error(text: str, name: str) -> ConfigError:
    """Of what is no YAML and is meant as JSON, which but for tabs would be YAML."""
    try:
        json.loads(text)
    except json.JSONDecodeError as e:
        return ConfigError(
            f"{name}, line {e.lineno}, column {e.colno}: not valid JSON: {e.msg}",
            next_step="Correct it there or just before: keys and texts in double quotes, a comma between entries and "
            "none after the last one, as many closing brackets as opening ones.",
        )
    except RecursionError:
        return ConfigError(f"{name}: not valid JSON: nested too deeply", next_step="Correct the file.")
    return ConfigError(f"{name}: is JSON with tabs between its entries", next_step="Indent it with spaces.")


def _walk(
    node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int], duplicates: list[FieldPath], seen: set[int]
) -> None:
    if id(node) in seen:  # an alias, perhaps to something around it
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, str(key.value))
            if at in lines:
                duplicates.append(at)
                continue
            lines[at] = key.start_mark.line + 1
            _walk(value, at, lines, duplicates, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _walk(item, (*path, index), lines, duplicates, seen)
