"""Turning what a model rejects into problems that a reader can fix: field, value, line, and the way out."""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from meshfusion.dpu.yaml_document import YamlDocument
from meshfusion.jbof.errors import ConfigError

_MAX_VALUE_CHARS = 80
_CONTAINERS = (dict, list)


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
        shown = "" if self.value is None or isinstance(self.value, _CONTAINERS) else f" = {_short(self.value)}"
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


def describe_errors(error: ValidationError, model: type[BaseModel], document: YamlDocument) -> list[ConfigProblem]:
    """One problem for each entry of ``error``, raised by ``model`` on ``document``."""
    return [_describe(entry, model, document) for entry in error.errors(include_url=False)]


def _describe(entry: Any, model: type[BaseModel], document: YamlDocument) -> ConfigProblem:
    at: tuple[str | int, ...] = entry["loc"]
    field, line, value = ".".join(map(str, at)) or "the file", document.line_of(at), entry["input"]
    owner = _model_at(model, at[:-1])
    known = owner.model_fields if owner else {}
    if entry["type"] == "extra_forbidden":
        return ConfigProblem(field, "unknown key", _suggestion(at, list(known)), None, line)
    info = known.get(str(at[-1])) if at else None
    example = _example(info)
    if entry["type"] == "missing":
        return ConfigProblem(
            field, "is missing", f"add {at[-1]}: {example}" if example else f"add {at[-1]}", None, line
        )
    problem = entry["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return ConfigProblem(field, problem, f"write for example {example}" if example else "correct it", value, line)


def _suggestion(at: tuple[str | int, ...], known: list[str]) -> str:
    prefix = "".join(f"{part}." for part in at[:-1])
    near = difflib.get_close_matches(str(at[-1]), known, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"remove it; known here: {', '.join(known)}"


def _example(info: FieldInfo | None) -> str:
    if info is None:
        return ""
    if info.examples:
        value = info.examples[0]
    elif info.is_required() or isinstance(info.default, BaseModel):
        return ""
    else:
        value = info.default
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model_at(model: type[BaseModel], at: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The model that describes the mapping at ``at``."""
    for part in at:
        info = model.model_fields.get(str(part))
        nested = _nested_model(info.annotation) if info else None
        if nested is None:
            return None
        model = nested
    return model


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
