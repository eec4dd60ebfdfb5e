"""Turning what a model rejects into problems that a reader can fix: field, value, line, and the way out."""

from __future__ import annotations

import difflib
import enum
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from meshfusion.jbof.errors import ConfigError, FieldValueError
from meshfusion.jbof.sizes import format_size, parse_size_bytes

_MAX_VALUE_CHARS = 80
_BOUND_WORDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
_BOUND_KEYS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_TYPE_WORDS = {  # by how the names of the errors begin
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "a text",
    "model": "a mapping of keys to values",
    "dict": "a mapping of keys to values",
}
FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing to correct. ``value`` None: the field is absent or its value does not matter."""

    field: str
    problem: str
    fix: str
    value: object = None
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        shown = "" if self.value is None else f" = {_short(self.value)}"
        return f"{where}{self.field}{shown}: {self.problem}; {self.fix}"


class ConfigProblemsError(ConfigError):
    """Everything that is wrong with one file. ``problems`` is never empty."""

    def __init__(
        self,
        name: str,
        problems: tuple[ConfigProblem, ...],
        *,
        next_step: str = "Correct the file; `mfctl config example` prints a documented one.",
    ) -> None:
        assert problems
        self.problems = tuple(sorted(problems, key=lambda p: p.line or 0))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{name}: {count}{lines}", next_step=next_step)


class Document(Protocol):
    """What was configured, and where each key stands."""

    @property
    def data(self) -> Any: ...
    def line_of(self, path: FieldPath, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Unlined:
    """A document that comes from no file of ours."""

    data: Any

    def line_of(self, path: FieldPath, /) -> int | None:
        return None


def as_fix(next_step: str) -> str:
    """An error's next step as the last part of a problem's line."""
    return next_step[:1].lower() + next_step[1:].rstrip(".")


def describe_errors(
    error: ValidationError,
    model: type[BaseModel],
    document: Document,
    *,
    at: FieldPath = (),
    root_name: str = "the file",
) -> list[ConfigProblem]:
    """One problem for each slip in ``error``, raised by ``model`` on what stands in ``document`` at ``at``.

    ``root_name`` is what the whole is called. A missing key that an unknown one probably stands for is one slip.
    """
    meant = misspelt(error, model)
    describe = _Describer(model, document, at, root_name).describe
    return [
        describe(entry)
        for entry in error.errors(include_url=False)
        if not (entry["type"] == "missing" and entry["loc"] in meant)
    ]


def misspelt(error: ValidationError, model: type[BaseModel]) -> frozenset[FieldPath]:
    """The keys that the unknown ones in ``error`` probably stand for."""
    unknown = (entry["loc"] for entry in error.errors(include_url=False) if entry["type"] == "extra_forbidden")
    return frozenset((*at[:-1], near) for at in unknown if (near := _nearest(at, _known(model, at))))


class _Describer:
    def __init__(self, model: type[BaseModel], document: Document, at: FieldPath, root_name: str) -> None:
        self._model = model
        self._document = document
        self._at = at
        self._root_name = root_name

    def describe(self, entry: Any) -> ConfigProblem:
        at: FieldPath = entry["loc"]
        error = entry.get("ctx", {}).get("error")
        if isinstance(error, FieldValueError) and error.field:
            at = (*at, *error.field.split("."))
        known = _known(self._model, at)
        info = known.get(str(at[-1])) if at else None
        example = _example(info)
        if entry["type"] == "extra_forbidden":
            return self._problem(at, "unknown key", self._suggestion(at, known))
        if entry["type"] == "missing":
            return self._problem(at, "is missing", f"add {at[-1]}: {example}" if example else f"add {at[-1]}")
        fix = f"write for example {example}" if example else "correct it"
        if isinstance(error, FieldValueError):
            problem, fix = error.problem, error.fix
        elif bounds := _bounds(info) if entry["type"].startswith(("greater_than", "less_than")) else "":
            problem, fix = _wording(entry, info), f"use {bounds}" + (f", for example {example}" if example else "")
        else:
            problem = _wording(entry, info)
        is_given, value = self._given(at)
        if is_given and value is None:
            problem = f"is null: {problem}"
        is_of_a_mapping = isinstance(value, dict) and (info is None or _nested_model(info.annotation) is not None)
        return self._problem(at, problem, fix, None if is_of_a_mapping else value)

    def _problem(self, at: FieldPath, problem: str, fix: str, value: object = None) -> ConfigProblem:
        path = (*self._at, *at)
        return ConfigProblem(
            ".".join(map(str, path)) or self._root_name, problem, fix, value, self._document.line_of(path)
        )

    def _suggestion(self, at: FieldPath, known: dict[str, FieldInfo]) -> str:
        outer, _, inner = str(at[-1]).partition(".")
        nested = _model_at(self._model, (*at[:-1], outer))
        if inner and nested is not None and inner in nested.model_fields:
            form = json.dumps({outer: {inner: self._given(at)[1]}}, default=str)
            return f"write the one inside the other: {form[1:-1]}"
        near = _nearest(at, known)
        if near:
            return f"did you mean {'.'.join(map(str, (*self._at, *at[:-1], near)))}?"
        return f"remove it; known here: {', '.join(known)}"

    def _given(self, at: FieldPath) -> tuple[bool, object]:
        """Is there a value, and which? As it was written: a size is turned into a number before it is judged."""
        value = self._document.data
        for part in (*self._at, *at):
            is_in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
            if not is_in_list and not (isinstance(value, dict) and part in value):
                return False, None
            value = value[part]
        return True, value


def _nearest(at: FieldPath, known: dict[str, FieldInfo]) -> str:
    """The known key that the last one of ``at`` resembles, or ""."""
    return next(iter(difflib.get_close_matches(str(at[-1]), list(known), n=1)), "")


def _known(model: type[BaseModel], at: FieldPath) -> dict[str, FieldInfo]:
    """The keys of the mapping that ``at`` is in."""
    owner = _model_at(model, at[:-1])
    return owner.model_fields if owner else {}


def _wording(entry: Any, info: FieldInfo | None) -> str:
    """What was rejected, in words that need no knowledge of the library that did."""
    kind: str = entry["type"]
    if kind in _BOUND_WORDS:
        return f"must be {_BOUND_WORDS[kind]} {_number(entry['ctx'][_BOUND_KEYS[kind]], info)}"
    if kind in ("enum", "literal_error"):
        return f"must be {entry['ctx']['expected']}"
    known = _TYPE_WORDS.get(kind.split("_")[0])
    return f"must be {known}" if known else str(entry["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def _bounds(info: FieldInfo | None) -> str:
    """``more than 0 and at most 1``, as the field has it; "" when it has none."""
    found = []
    for mark in info.metadata if info else ():
        for kind, key in _BOUND_KEYS.items():
            if hasattr(mark, key):
                found.append(f"{_BOUND_WORDS[kind]} {_number(getattr(mark, key), info)}")
    return " and ".join(found)


def _number(value: Any, info: FieldInfo | None) -> str:
    return format_size(value) if _is_size(info) else f"{value:g}" if isinstance(value, float) else str(value)


def _is_size(info: FieldInfo | None) -> bool:
    return info is not None and any(getattr(mark, "func", None) is parse_size_bytes for mark in info.metadata)


def _example(info: FieldInfo | None) -> str:
    if info is None:
        return ""
    if info.examples:
        value = info.examples[0]
    elif info.is_required() or info.default is None or isinstance(info.default, BaseModel):
        return ""
    else:
        value = info.default
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, int) and _is_size(info):
        return format_size(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model_at(model: type[BaseModel], at: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The model that describes the mapping at ``at``."""
    parts = iter(at)
    for part in parts:
        info = model.model_fields.get(str(part))
        nested = _nested_model(info.annotation) if info else None
        if nested is None and info is not None and next(parts, None) is not None:  # the name of one of several
            nested = _model_of_each(info.annotation)
        if nested is None:
            return None
        model = nested
    return model


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _model_of_each(annotation: Any) -> type[BaseModel] | None:
    """Of a mapping of names to what one model describes: that model."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    of_names = (typing.get_args(option) for option in options if typing.get_origin(option) is dict)
    return next((found for args in of_names if (found := _nested_model(args[1]))), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
