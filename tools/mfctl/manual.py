"""Manual pages from the tree of commands, in the macros of man(7)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import click

from meshfusion.tools.mfctl.command_tree import (
    all_commands,
    arguments_of,
    default_of,
    help_of,
    longest_name,
    options_of,
    summary_of,
    value_of,
)

_COMMAND_IN_TEXT: Final = re.compile(r"`([^`]+)`")
_ESCAPES: Final = str.maketrans({"\\": r"\(rs", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "~": r"\(ti", "^": r"\(ha"})
FILES: Final = {
    "$MFCTL_CONFIG": "Contexts.",
    "$XDG_CONFIG_HOME/mfctl/contexts.yaml, ~/.config/mfctl/contexts.yaml": "Contexts, where MFCTL_CONFIG is not set.",
}


def page_name(name: str) -> str:
    """``mfctl pool status`` -> ``mfctl-pool-status``."""
    return name.replace(" ", "-")


def manual_pages(root: click.Group, name: str, version: str, exit_codes: Mapping[int, str]) -> dict[str, str]:
    """A page for each command and group, by the name of its file. When and where they were made is not in them."""
    tree = dict(all_commands(root, name))
    return {
        f"{page_name(at)}.1": manual_page(root, name, at, command, version, exit_codes) for at, command in tree.items()
    }


def manual_page(
    root: click.Group, root_name: str, name: str, command: click.Command, version: str, exit_codes: Mapping[int, str]
) -> str:
    lines = [
        f'.TH "{page_name(name).upper()}" 1 "" "MeshFusion {version}" "MeshFusion"',
        ".SH NAME",
        rf"{_escaped(page_name(name))} \- {_escaped(_uncapitalized(summary_of(command)))}",
        ".SH SYNOPSIS",
        *_synopsis(root_name, name, command),
        ".SH DESCRIPTION",
        *_paragraphs(help_of(command)),
    ]
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS", *_commands(command, name)]
    options = options_of(command)
    if options:
        lines += [".SH OPTIONS", *(line for option in options for line in _option(option))]
    lines += [".SH EXIT STATUS", *(line for code, text in exit_codes.items() for line in _item(str(code), text))]
    if command is root:
        lines += [".SH FILES", *(line for path, text in FILES.items() for line in _item(path, text))]
        variables = [(option.envvar, option) for option in options if isinstance(option.envvar, str)]
        lines.append(".SH ENVIRONMENT")
        lines += [line for variable, o in variables for line in _item(variable, f"As {longest_name(o)}.")]
    lines += [".SH SEE ALSO", *_see_also(root, root_name, name)]
    return "\n".join(lines) + "\n"


def _synopsis(root_name: str, name: str, command: click.Command) -> Iterator[str]:
    words = [rf"\fB{_escaped(name)}\fR"]
    if name == root_name:
        words.append(r"[\fIOPTIONS\fR]")
    if isinstance(command, click.Group):
        words.append(r"\fICOMMAND\fR ...")
    else:
        words += [r"[\fIOPTIONS\fR]", *(_escaped(argument) for argument in arguments_of(command))]
    yield " ".join(words)


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):  # as click has it: its lines stay as they are
            yield from (".nf", *map(_line, paragraph.splitlines()[1:]), ".fi")
        else:
            yield from map(_line, paragraph.splitlines())


def _commands(group: click.Group, name: str) -> Iterator[str]:
    for child_name, child in sorted(group.commands.items()):
        yield from _item(f"{name} {child_name}", f"{summary_of(child)}.")


def _option(option: click.Option) -> Iterator[str]:
    value = value_of(option)
    yield ".TP"
    yield rf"\fB{_escaped(longest_name(option))}\fR" + (rf" \fI{_escaped(value)}\fR" if value else "")
    default = default_of(option)
    told = {"": "", "required": " Must be given."}.get(default, f" Default: {default}.")
    yield _line(f"{' '.join((option.help or '').split())}{told}")


def _item(head: str, text: str) -> tuple[str, str, str]:
    return (".TP", rf"\fB{_escaped(head)}\fR", _line(text))


def _see_also(root: click.Group, root_name: str, name: str) -> Iterator[str]:
    """What is around it, and what is in it."""
    above = name.rpartition(" ")[0]
    near = [at for at, _ in all_commands(root, root_name) if at != name and at.rpartition(" ")[0] in (above, name)]
    pages = [page_name(at) for at in ([above] if above else []) + near]
    yield ", ".join(rf"\fB{_escaped(page)}\fR(1)" for page in pages)


def _uncapitalized(text: str) -> str:
    """As NAME has it; a name in capitals stays one."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _line(text: str) -> str:
    """Text of one line, with commands between backquotes in bold."""
    parts = [
        rf"\fB{_escaped(part)}\fR" if number % 2 else _escaped(part)
        for number, part in enumerate(_COMMAND_IN_TEXT.split(text))
    ]
    line = "".join(parts)
    # A line that begins with one of these would be an instruction.
    return rf"\&{line}" if line.startswith((".", "'")) else line


def _escaped(text: str) -> str:
    """So that a reader can copy it: groff(1) makes typographical signs of these."""
    return text.translate(_ESCAPES)
