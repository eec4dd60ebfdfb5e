"""The documented example of the service's configuration file, written from the model so that it cannot go stale."""

from __future__ import annotations

import textwrap
import types
import typing
from typing import Any

from pydantic import BaseModel

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
            lines += [*(part if nested is info.annotation else map(_commented, part)), ""]
            continue
        lines += _comment(info.description or "", indent)
        # What is left out by default stands in the example as a comment.
        optional = not info.is_required() and info.default is None and name != "size"
        value = info.examples[0] if info.examples else info.default
        lines.append(f"{indent}{'# ' if optional else ''}{name}: {_scalar(value)}")
        if not indent:
            lines.append("")
    return lines


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
