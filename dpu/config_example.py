"""The documented example of the service's configuration file, written from the model so that it cannot go stale."""

from __future__ import annotations

import textwrap
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshfusion.dpu.config import ServiceConfig

_WIDTH = 100


def example_service_config() -> str:
    """YAML text: every field with its description; fields with a default show it."""
    lines = ["# Configuration of the MeshFusion chunk service. Start it with: mfctl service run --config FILE", ""]
    lines += _fields(ServiceConfig, "")
    return "\n".join(lines).rstrip() + "\n"


def _fields(model: type[BaseModel], indent: str) -> list[str]:
    lines: list[str] = []
    for name, info in model.model_fields.items():
        nested = _model_of(info.annotation)
        if nested is not None:
            lines += _comment(nested.__doc__ or "", indent)
            part = [f"{indent}{name}:", *_fields(nested, indent + "  ")]
            is_shown = nested is info.annotation or name == "pool"  # one of pool and pools there must be
            lines += [*(part if is_shown else map(_commented, part)), ""]
            continue
        if _is_of_names(info.annotation):
            lines += [*_comment(info.description or "", indent), *map(_commented, _several(name, info, indent)), ""]
            continue
        lines += _comment(info.description or "", indent)
        # What is left out by default stands in the example as a comment.
        optional = not info.is_required() and info.default is None and name != "size"
        value = info.examples[0] if info.examples else info.default
        lines.append(f"{indent}{'# ' if optional else ''}{name}: {_scalar(value)}")
        if not indent:
            lines.append("")
    return lines


def _several(name: str, info: FieldInfo, indent: str) -> list[str]:
    """One of them, whose parts stand in full elsewhere in the file."""
    (each,) = (found for option in typing.get_args(info.annotation) if (found := _model_of_each(option)))
    inner = indent + "  "
    lines = [f"{indent}{name}:", f"{inner}{(info.examples or ['name'])[0]}:"]
    for field, part in each.model_fields.items():
        nested = _model_of(part.annotation)
        if nested is not None and field not in ServiceConfig.model_fields:
            lines += [*_comment(nested.__doc__ or "", inner + "  "), f"{inner}  {field}:"]
            lines += _fields(nested, inner + "    ")
            continue
        value = f"{{}}  # as {field} in this file" if nested else _scalar((part.examples or [part.default])[0])
        lines += [] if nested else _comment(part.description or "", inner + "  ")
        lines.append(f"{inner}  {field}: {value}")
    return lines


def _is_of_names(annotation: Any) -> bool:
    """Is it a mapping of names to what one model describes?"""
    return any(_model_of_each(option) for option in typing.get_args(annotation))


def _model_of_each(annotation: Any) -> type[BaseModel] | None:
    return _model_of(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a part of the file, which may be left out."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _commented(line: str) -> str:
    body = line.lstrip()
    return line if not body or body.startswith("# ") else f"{line[: len(line) - len(body)]}# {body}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text.strip(), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
