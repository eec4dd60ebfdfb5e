"""``mfctl token``: create."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.output import format_option, print_document

_ROLES = ["engine", "operator", "read-only"]


@click.group()
def token() -> None:
    """Make tokens that callers of a service show."""


@token.command()
@click.argument("name")
@click.option("--role", type=click.Choice(_ROLES), required=True, help="What its bearer may do (docs/security.md).")
@click.option("--tenant", default="default", show_default=True, metavar="NAME", help="For whom its bearer may attach.")
@click.option(
    "--output", "out", type=click.Path(path_type=Path, readable=False),
    help="Write the token to this new file, mode 0600, instead of printing it, which is for a terminal only.",
)  # fmt: skip
@format_option
def create(name: str, role: str, tenant: str, out: Path | None, output_format: str) -> None:
    """Make a random token for NAME, and the entry for the service's tokens_file.

    The token is printed this once and kept nowhere; the entry does not tell it. It belongs into a file that its bearer
    alone can read: --output makes it, and the entry alone is on standard output then. For programs, --format json has
    both.
    """
    import yaml

    from meshfusion.dpu.access.tokens_file import TokenEntry
    from meshfusion.dpu.api.security.token_text import TOKEN_BYTES, digest_of, token_of

    text = token_of(secrets.token_bytes(TOKEN_BYTES))
    if not 1 <= len(name) <= 200 or not 1 <= len(tenant) <= 200:
        raise click.UsageError("NAME and --tenant have 1 to 200 characters.")
    if out is None and output_format == "table" and not sys.stdout.isatty():
        # Behind >> tokens.yaml the token would stand beside its digest.
        raise click.UsageError("Standard output is no terminal: --output FILE for the token; the entry is printed.")
    entry = TokenEntry(name=name, sha256=digest_of(text), role=role, tenant=tenant).model_dump()  # type: ignore[arg-type]
    if out is not None:
        _write_new(out, text)
    if output_format != "table":
        print_document({**({} if out else {"token": text}), "entry": entry}, output_format)
        return
    if out is None:
        click.echo(text)
    else:
        click.echo(f"wrote the token to {out}", err=True)
    click.echo("\nEntry for the service's tokens_file (mode 0600):", err=True)
    click.echo(yaml.safe_dump([entry], sort_keys=False), nl=False)


def _write_new(path: Path, text: str) -> None:
    """Raises ConfigError when there is something already: a token in use is not replaced by a slip. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"--output: {path} exists", next_step="Name another file, or remove it.") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
