"""``mfctl audit``: show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from meshfusion.jbof.errors import ConfigError, FormatError
from meshfusion.tools.mfctl.output import format_option, print_document, print_table

_OF_EACH: Final = ("time", "call", "principal", "peer", "rpc", "outcome")


@click.group()
def audit() -> None:
    """Look at the record of calls of administration."""


@audit.command()
@click.argument("file", type=click.Path(path_type=Path, readable=False))
@click.option("--last", type=click.IntRange(1), metavar="COUNT", help="Only the last ones.")
@format_option
def show(file: Path, last: int | None, output_format: str) -> None:
    """Show the calls in FILE, an audit log of a service; the latest last.

    A call that did not end (the service died, or the log could not be written then) has the outcome "begun"; one
    whose record came so late that it was not made, "not made".
    """
    found, passed_over = read_calls(file)
    for number in passed_over:
        click.echo(f"note: {file}, line {number}: is no record of an audit log, and was passed over", err=True)
    calls = found[-last if last else None :]
    if output_format != "table":
        print_document({"calls": calls}, output_format)
        return
    print_table(
        ["TIME", "PRINCIPAL", "PEER", "CALL", "ARGUMENTS", "OUTCOME", "MS"],
        [
            (
                *(call["time"], call["principal"], call["peer"], call["rpc"]),
                " ".join(f"{name}={value}" for name, value in call["arguments"].items()) or "-",
                *(call["outcome"], "-" if call["duration_ms"] is None else call["duration_ms"]),
            )
            for call in calls
        ],
    )


def read_calls(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """One a call, from the two records of it; and the numbers of lines that are no records, as a service leaves one
    behind that dies while it writes. Raises OSError, and :class:`~meshfusion.jbof.errors.FormatError` where no line is
    one."""
    if file.is_dir():
        from meshfusion.dpu.access.audit_log import FILE_NAME

        inside = file / FILE_NAME
        raise ConfigError(
            f"{file} is a directory",
            next_step=f"Name the file: {inside}" if inside.is_file() else "Name the file that audit.path names.",
        )
    calls: dict[str, dict[str, Any]] = {}
    passed_over = []
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                _add(calls, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError):
                passed_over.append(number)
    if passed_over and not calls:
        raise FormatError(
            f"{file}, line {passed_over[0]}: is no record of an audit log",
            next_step="Name a file that a service's audit.path names.",
        )
    return list(calls.values()), passed_over


def _add(calls: dict[str, dict[str, Any]], record: dict[str, Any]) -> None:
    """Raises KeyError and the like for what is no record, and then adds nothing."""
    known = calls.get(record["call"], {name: record[name] for name in _OF_EACH})
    calls[record["call"]] = known | {
        "outcome": record["outcome"],
        "arguments": dict(known.get("arguments") or record.get("arguments") or {}),
        "duration_ms": record.get("duration_ms"),
    }
