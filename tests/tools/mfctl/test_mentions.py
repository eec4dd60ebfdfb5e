"""Commands that documents and messages name exist: one that was renamed is not left behind in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from meshfusion.tools import generate_docs
from meshfusion.tools.mfctl.main import mfctl

ROOT = Path(generate_docs.__file__).resolve().parent.parent
# A group, and what stands behind it. What is between them may be options of mfctl itself, with their values.
_MENTION = re.compile(r"\bmfctl(?:[ \n]+--[a-z-]+[ \n]+\S+)*[ \n]+([a-z]+)[ \n]+([a-z][a-z-]*(?:\|[a-z][a-z-]*)*)")
_SHORT = re.compile(r"`([a-z]+) ([a-z][a-z-]*(?:\|[a-z][a-z-]*)+)`")  # several at once, as the README has them
_SUFFIXES = {".md", ".py", ".sh", ".yml", ".json", ".service", ""}
_PROSE = {"is", "and", "of", "or", "to", "for", "in", "with", "on", "the", "a", "that"}


def texts() -> Iterator[tuple[str, str]]:
    """Not the list of changes, which tells former names."""
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "jbof/**/*.py",
        "dpu/**/*.py",
        "host/**/*.py",
        "tools/**/*",
    ):
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix in _SUFFIXES and path.is_file():
                yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


def stale(text: str) -> list[str]:
    """Of groups that exist, commands that they do not have."""
    found = []
    for group_name, names in _MENTION.findall(text) + _SHORT.findall(text):
        group = mfctl.commands.get(group_name)
        if isinstance(group, click.Group):
            missing = {name for name in names.split("|") if name not in group.commands} - _PROSE
            found += [f"mfctl {group_name} {name}" for name in sorted(missing)]
    return found


def test_every_command_that_is_named_exists() -> None:
    named = dict(texts())
    assert len(named) > 300
    assert {name: found for name, text in named.items() if (found := stale(text))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see `mfctl chunk ls`", ["mfctl chunk ls"]),
        ("mfctl --context x service\nstate", ["mfctl service state"]),
        ("mfctl pool status|mend|check", ["mfctl pool mend"]),
        ("`service run|state`", ["mfctl service state"]),
        ("mfctl pool rebuild-index PATH; mfctl doctor looks; mfctl prints all; mfctl service is", []),
    ],
)
def test_what_does_not_exist_is_found(text: str, found: list[str]) -> None:
    assert stale(text) == found
