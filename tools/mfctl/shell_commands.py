"""``mfctl completion`` and ``mfctl man``: what shells and readers of manuals get from the tree of commands."""

from __future__ import annotations

from pathlib import Path

import click

from meshfusion.tools.mfctl.exit_codes import EXIT_CODES
from meshfusion.tools.mfctl.output import format_option, print_document
from meshfusion.tools.mfctl.own_version import own_version

_SHELLS = ("bash", "fish", "zsh")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@format_option
@click.pass_context
def completion(context: click.Context, shell: str, output_format: str) -> None:
    """Print the script with which SHELL completes commands, options, formats, contexts, services and paths.

    \b
    bash:  mfctl completion bash > /etc/bash_completion.d/mfctl
    zsh:   mfctl completion zsh > "${fpath[1]}/_mfctl"
    fish:  mfctl completion fish > ~/.config/fish/completions/mfctl.fish

    For this shell alone: eval "$(mfctl completion bash)".
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click has these three"
    made = kind(context.find_root().command, {}, "mfctl", "_MFCTL_COMPLETE")
    # Not made.source(): for bash that asks for its version first, and this may be run elsewhere than it is used.
    script = made.source_template % made.source_vars()
    if output_format != "table":
        print_document({"shell": shell, "script": script}, output_format)
    else:
        click.echo(script)


@click.command()
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.option(
    "--output", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Write a page for each command there, such as /usr/local/share/man/man1; those that are there are replaced.",
)  # fmt: skip
@format_option
@click.pass_context
def man(context: click.Context, words: tuple[str, ...], folder: Path | None, output_format: str) -> None:
    """Print the manual page of COMMAND, or of mfctl, for man -l: mfctl man pool status | man -l -."""
    from meshfusion.tools.mfctl.manual import manual_pages, page_name

    root = context.find_root().command
    assert isinstance(root, click.Group)
    pages = manual_pages(root, "mfctl", own_version(), EXIT_CODES)
    if folder is not None:
        if words:
            raise click.UsageError("--output writes the pages of all commands: leave COMMAND out.")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (folder / name).write_text(text, encoding="utf-8")
        if output_format != "table":
            print_document({"folder": str(folder), "pages": sorted(pages)}, output_format)
        else:
            click.echo(f"wrote {len(pages)} pages into {folder}")
        return
    name = f"{page_name(' '.join(('mfctl', *words)))}.1"
    if name not in pages:
        raise click.UsageError(f"There is no command {' '.join(words)!r}; mfctl --help lists them.")
    if output_format != "table":
        print_document({"page": name, "text": pages[name]}, output_format)
    else:
        click.echo(pages[name], nl=False)
