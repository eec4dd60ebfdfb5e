"""Running the few programs that a build needs, with a deadline and their own words when they fail."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshfusion.tools.image.errors import BuildError


def run_command(
    argv: Sequence[str],
    *,
    about: str,
    deadline_s: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    install: str = "",
) -> bytes:
    """What it prints on stdout. ``environment``: added to this process's, in which a proxy may be set. ``install``: the
    Debian package that has the program.

    Raises BuildError, and :class:`CommandFailedError` when it ends with another status than 0.
    """
    try:
        done = subprocess.run(
            argv, cwd=directory, env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        hint = f"sudo apt-get install {install}" if install else "Install it."
        raise BuildError(f"{about}: there is no program {argv[0]}", next_step=hint) from None
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{about}: {argv[0]} was not done after {deadline_s:.0f} s",
            next_step="Check the network, then run the same command again.",
        ) from None
    if done.returncode:
        raise CommandFailedError(about, argv[0], done.returncode, done.stderr.decode(errors="replace"))
    return done.stdout


class CommandFailedError(BuildError):
    """``said``: what the program wrote on stderr."""

    def __init__(self, about: str, program: str, code: int, said: str) -> None:
        lines = [line for line in said.strip().splitlines() if line.strip()]
        super().__init__(
            f"{about}: {program} ended with status {code}: {' / '.join(lines[-3:]) or 'without a word'}",
            next_step="See what it says; then run the same command again.",
        )
        self.said = said
