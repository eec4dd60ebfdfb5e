"""The manual pages: of every command, all of it, and as groff takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshfusion.tools.mfctl.command_tree import all_commands, leaf_commands, longest_name, options_of, summary_of
from meshfusion.tools.mfctl.exit_codes import EXIT_CODES
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.manual import manual_page, manual_pages, page_name

PAGES = manual_pages(mfctl, "mfctl", "1.2.3", EXIT_CODES)
_MACROS = {".TH", ".SH", ".PP", ".TP", ".nf", ".fi"}


def plain(page: str) -> str:
    """What a reader sees, near enough: without macros and fonts."""
    for escape, sign in {r"\-": "-", r"\(aq": "'", r"\(ga": "`", r"\(ti": "~", r"\(ha": "^", r"\&": ""}.items():
        page = page.replace(escape, sign)
    return re.sub(r"\\f[BIR]", "", page).replace(r"\(rs", "\\")


def test_there_is_a_page_for_every_command_with_all_its_options() -> None:
    commands = dict(all_commands(mfctl, "mfctl"))
    assert len(commands) > 50
    assert set(PAGES) == {f"{page_name(name)}.1" for name in commands}
    for name, command in commands.items():
        page = plain(PAGES[f"{page_name(name)}.1"])
        assert summary_of(command)[1:] in page
        for option in options_of(command):
            assert f"\n{longest_name(option)}" in page, (name, option.name)
            assert " ".join((option.help or "").replace("`", "").split()) in page
        for code, text in EXIT_CODES.items():
            assert f"\n{code}\n{text}" in page


def test_pages_lead_to_each_other() -> None:
    for page in PAGES.values():
        for name in re.findall(r"([a-z0-9-]+)\(1\)", plain(page)):
            assert f"{name}.1" in PAGES


def test_nothing_but_macros_begins_like_one() -> None:
    for page in PAGES.values():
        for line in page.splitlines():
            assert line, "an empty line is a break nobody asked for"
            if line.startswith((".", "'")):
                assert line.split(" ")[0] in _MACROS, line


def test_signs_of_the_formatter_in_a_text_are_signs_of_the_text() -> None:
    @click.group()
    def root() -> None:
        r"""Do it.

        .so /etc/passwd
        'tis a \n and a `command --option`.
        """

    page = manual_page(root, "tool", "tool", root, "1", {0: "done"})
    assert "\n\\&.so /etc/passwd\n" in page
    assert "\n\\(aqtis a \\(rsn and a \\fBcommand \\-\\-option\\fR.\n" in page


def test_groff_and_man_take_every_page(tmp_path: Path) -> None:
    """Where they are; what they would refuse is looked for above, too."""
    groff, man = shutil.which("groff"), shutil.which("man")
    for name, text in PAGES.items():
        (tmp_path / name).write_text(text)
    if groff is not None:
        files = [str(tmp_path / name) for name in PAGES]
        made = subprocess.run(
            [groff, "-man", "-Kutf8", "-Tutf8", "-ww", "-z", *files], capture_output=True, text=True, check=True
        )
        assert made.stderr == ""
    if man is not None:
        environment = {"MANWIDTH": "100", "MANROFFOPT": "-c", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
        page = tmp_path / "mfctl-pool-status.1"
        shown = subprocess.run([man, "-P", "cat", "-l", str(page)], capture_output=True, text=True, env=environment)
        assert shown.returncode == 0, shown.stderr
        seen = re.sub(r".\x08|\x1b\[\d*m", "", shown.stdout)
        assert "mfctl-pool-status - show what a pool holds and who uses it" in seen
        assert "--timeout SECONDS" in seen


def test_a_page_is_printed_and_all_are_written(tmp_path: Path) -> None:
    def run(*arguments: str) -> click.testing.Result:
        return CliRunner().invoke(mfctl, ["man", *arguments])

    assert '"MFCTL-POOL-STATUS" 1' in run("pool", "status").stdout
    assert run().stdout.startswith('.TH "MFCTL" 1')
    assert json.loads(run("pool", "--format", "json").stdout)["page"] == "mfctl-pool.1"
    assert run("--output", str(tmp_path / "man1")).exit_code == 0
    assert {path.name for path in (tmp_path / "man1").iterdir()} == set(PAGES)
    assert run("no", "such").exit_code == 2
    assert run("pool", "--output", str(tmp_path)).exit_code == 2


def test_the_tree_is_that_of_the_help() -> None:
    names = [name for name, _ in leaf_commands(mfctl, "mfctl")]
    assert names == sorted(names)
    assert {"mfctl pool status", "mfctl context set", "mfctl man"} <= set(names)


@pytest.mark.parametrize(
    ("help_text", "summary"),
    [("Do it. And more.", "Do it"), ("Do it.\n\nMore.", "Do it"), ("Do it,\nas v1.2 has it", "Do it, as v1.2 has it")],
)
def test_the_first_sentence(help_text: str, summary: str) -> None:
    assert summary_of(click.Command("x", help=help_text)) == summary
