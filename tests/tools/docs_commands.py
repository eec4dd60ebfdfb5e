"""The commands that documents show: are they ones that `mfctl` takes? Nothing is run.

In blocks of the shell each command of `mfctl` and `meshfusion` is parsed as it stands. In the text, where commands are
named more than shown, the command has to exist, and the options that are named with it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import click

_FENCE: Final = re.compile(r"^```(\w*)\s*$")
_SHELL: Final = frozenset({"sh", "bash", "console", "shell"})
_INLINE: Final = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_ENDS: Final = frozenset({"&&", "||", ";", "|", "&", "(", ")", ";;"})
_REDIRECTIONS: Final = frozenset({">", ">>", "<", "2>", ">&", "&>"})
# What stands for a value of its kind.
_PLACEHOLDERS: Final = {"NUMBER": "1", "SIZE": "1GiB", "COUNT": "1", "SECONDS": "1", "S": "1", "N": "1"}
_UNKNOWN: Final = frozenset({"...", "--"})
_RUNNERS: Final = frozenset({"sudo", "exec", "nohup", "time"})
_SETS_A_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Shown:
    """``line``: in the document, from 1. ``is_whole``: as it would be typed, and not only named."""

    line: int
    words: tuple[str, ...]
    is_whole: bool

    def __str__(self) -> str:
        return " ".join(self.words)


def shown_commands(text: str, programs: Mapping[str, click.Command]) -> Iterator[Shown]:
    """Of a document in Markdown, those of ``programs``."""
    for line, block, language in _blocks(text):
        if language in _SHELL:
            yield from _in_shell(line, block, programs)
    for line, prose in _prose(text):
        for found in _INLINE.finditer(prose):
            words = found[1].split()
            if words[0] in programs and len(words) > 1:
                yield Shown(line + prose[: found.start()].count("\n"), tuple(words), False)


def problem(shown: Shown, programs: Mapping[str, click.Command]) -> str:
    """Why it is not a command that is taken; empty where it is one."""
    program, *words = shown.words
    try:
        if shown.is_whole:
            _parse(programs[program], program, [_PLACEHOLDERS.get(word, word) for word in words])
        else:
            for each in _alternatives(words):
                _look_up(programs[program], each)
    except click.exceptions.Exit:
        return ""  # --help, --version
    except click.BadParameter as error:
        # Files of the reader are not here.
        is_missing = isinstance(error, click.MissingParameter)
        is_of_a_file = error.param is not None and isinstance(error.param.type, click.Path) and not is_missing
        return "" if is_of_a_file else error.format_message()
    except click.ClickException as error:
        return error.format_message()
    return ""


# ---- reading documents -------------------------------------------------------------------------------------------


def _blocks(text: str) -> Iterator[tuple[int, list[str], str]]:
    """``(number of the first line, lines, language)``."""
    begun: tuple[int, list[str], str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line.strip())
        if fence and begun is None:
            begun = (number + 1, [], fence[1])
        elif fence and begun is not None:
            yield begun
            begun = None
        elif begun is not None:
            begun[1].append(line)


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """What stands outside of blocks, a paragraph or so each."""
    kept: list[str] = []
    first, is_code = 1, False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line.strip()):
            is_code = not is_code
        if is_code or not line.strip() or _FENCE.match(line.strip()):
            yield first, "\n".join(kept)
            kept, first = [], number + 1
        else:
            kept.append(line)
    yield first, "\n".join(kept)


def _in_shell(first: int, lines: list[str], programs: Mapping[str, click.Command]) -> Iterator[Shown]:
    number, command = first, ""
    for at, line in enumerate(lines, first):
        if not command:
            number = at
        command += line[:-1] + " " if line.endswith("\\") else line
        if line.endswith("\\") or _is_open(command):
            command += "" if line.endswith("\\") else "\n"
            continue
        for words in _commands(command):
            yield from _of_programs(number, words, programs)
        command = ""


def _is_open(command: str) -> bool:
    """Does a quotation go on in the next line?"""
    try:
        list(_split(command))
    except ValueError:
        return True
    return False


def _split(command: str) -> Iterator[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    lexer.whitespace_split = True
    yield from lexer


def _commands(command: str) -> Iterator[list[str]]:
    words: list[str] = []
    skips = False
    for word in _split(command):
        if word in _ENDS:
            yield words
            words = []
        elif word in _REDIRECTIONS:
            skips = True
        elif skips:
            skips = False
        else:
            words.append(word)
    yield words


def _of_programs(line: int, words: list[str], programs: Mapping[str, click.Command]) -> Iterator[Shown]:
    """What is run first, or by what runs other programs (`sudo`, `kubectl exec ... --`), under any path."""
    at = 0
    while at < len(words) and (words[at] in _RUNNERS or _SETS_A_VARIABLE.match(words[at])):
        at += 1
    starts = [at, *(i + 1 for i, word in enumerate(words) if word == "--")]
    for start in starts:
        name = words[start].rpartition("/")[2] if start < len(words) else ""
        if name in programs:
            yield Shown(line, (name, *words[start + 1 :]), True)
            return


# ---- comparing with the program ----------------------------------------------------------------------------------


def _parse(command: click.Command, name: str, words: list[str], parent: click.Context | None = None) -> None:
    """As click does it, up to where the command would be run."""
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name, parent=parent)
        _, rest, _ = command.make_parser(context).parse_args(list(words))
        if not rest and words:
            return  # such as --version
        if not rest:
            raise click.UsageError(f"{name} alone is no command")
        child_name, child, child_words = command.resolve_command(context, rest)
        assert child is not None, "resolve_command fails else"
        _parse(child, child_name or "", child_words, context)
        return
    command.make_context(name, words, parent=parent)


def _alternatives(words: list[str]) -> Iterator[list[str]]:
    """`service run|state` names two commands."""
    for at, word in enumerate(words):
        if "|" in word and not word.startswith("-"):
            for each in word.split("|"):
                yield from _alternatives([*words[:at], each, *words[at + 1 :]])
            return
    yield words


def _look_up(command: click.Command, words: list[str]) -> None:
    """Raises click.UsageError for a command or an option that there is not."""
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in _UNKNOWN:
            return
        if word.startswith("-") and len(word) > 1:
            name = word.partition("=")[0].rstrip(",.;:")
            if name not in options and name not in ("--help", "-h", "--version"):
                raise click.UsageError(f"there is no option {name} of {command.name}")
        elif isinstance(command, click.Group):
            child = command.commands.get(word)
            if child is None:
                raise click.UsageError(f"there is no command {word} in {command.name}")
            command = child
            options |= {name for parameter in child.params for name in parameter.opts}
