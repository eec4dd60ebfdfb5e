"""``mfctl audit``: show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from meshfusion.jbof.errors import FormatError
from meshfusion.tools.mfctl.output import format_option, print_document, print_table


@click.group()
def audit() -> None:
    """Look at the record of calls of administration."""


@audit.command()
@click.argument("file", type=click.Path(path_type=Path, readable=False))
@click.option("--last", type=click.IntRange(1), metavar="COUNT", help="Only the last ones.")
@format_option
def show(file: Path, last: int | None, output_format: str) -> None:
    """Show the calls in FILE, an audit log of a service; the latest last.

    A call that did not end (the service died, or the log could not be written then) has the outcome "begun".
    """
    calls = read_calls(file)[-last if last else None :]
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


def read_calls(file: Path) -> list[dict[str, Any]]:
    """One a call, from the two records of it. Raises :class:`~meshfusion.jbof.errors.FormatError` and OSError."""
    calls: dict[str, dict[str, Any]] = {}
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                known = calls.setdefault(record["call"], {**record, "duration_ms": None})
                known |= {
                    "outcome": record["outcome"],
                    "arguments": known.get("arguments") or record.get("arguments") or {},
                    "duration_ms": record.get("duration_ms"),
                }
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise FormatError(
                    f"{file}, line {number}: is no record of an audit log",
                    next_step="Name a file that a service's audit.path names, or correct the line.",
                ) from error
    return list(calls.values())
