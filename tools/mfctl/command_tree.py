"""The tree of commands as documents show it: markdown, manual pages, and tests that look at every command."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click


def leaf_commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Each command that does something, with all the words that call it; sorted."""
    if isinstance(command, click.Group):
        for child_name, child in sorted(command.commands.items()):
            yield from leaf_commands(child, f"{name} {child_name}")
    else:
        yield name, command


def all_commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Groups too, each before what is in it."""
    yield name, command
    if isinstance(command, click.Group):
        for child_name, child in sorted(command.commands.items()):
            yield from all_commands(child, f"{name} {child_name}")


def help_of(command: click.Command) -> str:
    """Its words, with the paragraphs and line breaks of the source."""
    return inspect.cleandoc(command.help or "")


def summary_of(command: click.Command) -> str:
    """The first sentence of its words, on one line."""
    first = " ".join(help_of(command).partition("\n\n")[0].split())
    sentence, dot, _ = first.partition(". ")
    return sentence.removesuffix(".") if dot else first.removesuffix(".")


def options_of(command: click.Command) -> list[click.Option]:
    """Those that a user gives; not --help and --version."""
    return [p for p in command.params if isinstance(p, click.Option) and p.expose_value]


def arguments_of(command: click.Command) -> list[str]:
    """As the usage shows them: in brackets what may be left out."""
    return [_argument(p) for p in command.params if isinstance(p, click.Argument)]


def _argument(argument: click.Argument) -> str:
    shown = str(argument.metavar or (argument.name or "").upper())
    return shown if argument.required or shown.startswith("[") else f"[{shown}]"


def longest_name(option: click.Option) -> str:
    return max(option.opts, key=len)


def value_of(option: click.Option) -> str:
    """What stands for its value; "" for one without."""
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    if option.metavar is not None:
        return option.metavar
    return "" if option.is_flag else str(option.type.name).upper()


def default_of(option: click.Option) -> str:
    """ "" where there is none to be told, or "required"."""
    if option.required:
        return "required"
    # What stands for "no default" differs between versions of click; only what is shown in the help counts.
    if not option.show_default:
        return ""
    return option.show_default if isinstance(option.show_default, str) else str(option.default)
