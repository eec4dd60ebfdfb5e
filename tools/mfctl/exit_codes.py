"""How a command's end is told to scripts: the exit codes of ``mfctl`` and ``meshfusion``, and which error has which."""

from __future__ import annotations

from typing import Final

from meshfusion.jbof.errors import FormatError, MeshFusionError, PoolBusyError, ServiceUnavailableError

EXIT_DONE: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_POOL_BUSY: Final = 3
EXIT_DAMAGED: Final = 4
EXIT_UNREACHABLE: Final = 5
EXIT_INTERRUPTED: Final = 130

EXIT_CODES: Final = {
    EXIT_DONE: "done",
    EXIT_FAILURE: "failure; or what was looked at is not as it should be",
    EXIT_USAGE: "wrong usage, and nothing was done; or --yes is missing, and there is no terminal to ask at",
    EXIT_POOL_BUSY: "the pool is in use by another process",
    EXIT_DAMAGED: "the pool is damaged, foreign or of another version",
    EXIT_UNREACHABLE: "the service cannot be reached; of a context with several services, one of them",
    EXIT_INTERRUPTED: "interrupted, or not agreed to",
}
"""What each means; there are no others, but for commands that end as the command does that they run (NOTE)."""
NOTE: Final = "`mfctl lab run` and `mfctl lab shell` end as the command does that they run.\n"

BY_ERROR: Final[tuple[tuple[type[MeshFusionError], int], ...]] = (
    (PoolBusyError, EXIT_POOL_BUSY),
    (FormatError, EXIT_DAMAGED),
    (ServiceUnavailableError, EXIT_UNREACHABLE),
)
"""Of kinds of errors that have one of their own; subclasses have it too. All others end with 1."""


def exit_code(error: MeshFusionError) -> int:
    return next((code for kind, code in BY_ERROR if isinstance(error, kind)), EXIT_FAILURE)


def exit_codes_help() -> str:
    """For the end of ``--help``, as click keeps it."""
    width = max(len(str(code)) for code in EXIT_CODES)
    return "\b\nExit codes:\n" + "".join(f"  {code:>{width}}  {text}\n" for code, text in EXIT_CODES.items())


def exit_codes_table() -> str:
    """As markdown, with the kinds of errors that programs read in JSON."""
    kinds = {code: ", ".join(f"`{kind.__name__}`" for kind, of in BY_ERROR if of == code) for code in EXIT_CODES}
    kinds[EXIT_FAILURE] = "all others"
    kinds[EXIT_USAGE] = "`UsageError`, `BadParameter`, `MissingParameter`, `NoSuchOption` and the like"
    rows = (f"| {code} | {text} | {kinds[code]} |\n" for code, text in EXIT_CODES.items())
    head = "| exit code | means | `kind` of the error in JSON and YAML |\n|---|---|---|\n"
    return f"{head}{''.join(rows)}\n{NOTE}"
