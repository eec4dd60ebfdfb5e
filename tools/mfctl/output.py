"""How mfctl prints: plain aligned tables for people and pipes, JSON for programs, errors with their next step."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar

import click

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.exit_codes import exit_code

FORMATS: Final = ("table", "json", "yaml")

F = TypeVar("F", bound=Callable[..., Any])


def format_option(command: F) -> F:
    """Adds ``--format``; the command gets ``output_format``, "table", or what :func:`print_document` takes."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="What to print: a table for people, or JSON or YAML for programs.",
    )(command)


def wanted_format(arguments: Sequence[str]) -> str:
    """Which was asked for? Read from the raw arguments, because errors of parsing obey it too."""
    for option, value in pairwise((*arguments, "")):
        found = option.removeprefix("--format=") if option != "--format" else value
        if option.startswith("--format") and found in FORMATS:
            return found
    return "table"


def report_error(error: MeshFusionError, output_format: str) -> int:
    """Print ``error`` on stderr; returns the exit code it stands for."""
    code = exit_code(error)
    if output_format == "table":
        click.echo(f"error: {error}", err=True)
    else:
        _print_error(error_object(error), output_format)
    return code


def error_object(error: MeshFusionError) -> dict[str, Any]:
    """The form for programs. ``problems``: the single faults of a file, each with field, value, line and fix."""
    body = _error_body(type(error).__name__, error.message, error.next_step, exit_code(error))
    problems = [_plain(p) for p in getattr(error, "problems", ())]
    return {**body, "problems": problems} if problems else body


def report_object(kind: str, message: str, next_step: str, code: int, output_format: str) -> None:
    """One object on stderr."""
    _print_error(_error_body(kind, message, next_step, code), output_format)


def _error_body(kind: str, message: str, next_step: str, code: int) -> dict[str, Any]:
    return {"kind": kind, "message": message, "next_step": next_step, "exit_code": code}


def _print_error(body: dict[str, Any], output_format: str) -> None:
    if output_format == "yaml":
        click.echo(_to_yaml({"error": body}), nl=False, err=True)
    else:
        click.echo(json.dumps({"error": body}, default=str), err=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout; bytes become hex, dataclasses become objects."""
    click.echo(to_json(value, indent=2 if sys.stdout.isatty() else None))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """As :func:`print_json` prints it."""
    return json.dumps(value, indent=indent, default=_plain)


def print_document(value: Any, output_format: str) -> None:
    """On stdout, as :func:`print_json` does it, or the same as YAML."""
    if output_format == "yaml":
        click.echo(_to_yaml(value), nl=False)
    else:
        print_json(value)


def print_one_of_many(value: Any, output_format: str) -> None:
    """One of a stream of documents: JSON on a line each, or a YAML document each."""
    if output_format == "yaml":
        click.echo("---")
        click.echo(_to_yaml(value), nl=False)
    else:
        click.echo(to_json(value))


def _to_yaml(value: Any) -> str:
    import yaml

    plain = json.loads(json.dumps(value, default=_plain))
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return str(value)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns two spaces apart. Never cut or wrapped, so that a key can be copied and a pipe can be searched."""
    cells = [tuple(headers), *(tuple(printable(c) for c in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    for row in cells:
        click.echo("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """One ``name  value`` line each."""
    pairs = [(name, printable(value)) for name, value in fields]
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}  {value}".rstrip())


def printable(value: object) -> str:
    """Control characters out: names come from other processes and must not move the reader's cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def format_bytes(size_bytes: int) -> str:
    """``1536`` -> ``1.5 KiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def format_seconds(seconds: float) -> str:
    """``5400`` -> ``1.5 h``."""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"
