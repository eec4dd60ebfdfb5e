"""mfctl completion: what real shells are offered."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshfusion.tools.mfctl.completing import context_names, service_names
from meshfusion.tools.mfctl.main import mfctl

_DEADLINE_S = 60.0


@pytest.fixture
def environment(tmp_path: Path, contexts_file: Path) -> dict[str, str]:
    """With an mfctl in PATH, and two contexts."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    command = binaries / "mfctl"
    command.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from meshfusion.tools.mfctl.main import main; main()' \"$@\"\n"
    )
    command.chmod(0o755)
    contexts_file.write_text(
        "current: lab\ncontexts:\n  lab: {service: 'unix:///s'}\n"
        "  fleet: {services: {dpu-1: {address: 'unix:///1'}, dpu-2: {address: 'unix:///2'}}}\n"
    )
    contexts_file.chmod(0o600)
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "TERM": "dumb"}


def offered(lines: list[str], environment: dict[str, str]) -> list[list[str]]:
    """What bash is told for the last word of each line."""
    program = (
        "source <(mfctl completion bash) && complete -p mfctl >&2 && compopt() { :; }\n"
        'for line in "$@"; do\n'
        '  read -ra COMP_WORDS <<<"$line"; [[ $line == *" " ]] && COMP_WORDS+=("")\n'
        "  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()\n"
        '  _mfctl_completion mfctl; echo "${COMPREPLY[*]}"\n'
        "done"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", *lines],
        capture_output=True, text=True, env=environment, timeout=_DEADLINE_S, check=True,
    )  # fmt: skip
    assert "_mfctl_completion mfctl" in done.stderr, "bash knows for which command it is"
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_is_offered_commands_formats_contexts_and_services(environment: dict[str, str]) -> None:
    expected = {
        "mfctl con": ["config", "connector", "context"],
        "mfctl pool st": ["status"],
        "mfctl pool status --format ": ["table", "json", "yaml"],
        "mfctl --context ": ["lab", "fleet"],
        "mfctl context use f": ["fleet"],
        "mfctl --context fleet pool status --service ": ["dpu-1", "dpu-2"],
        "mfctl completion ": ["bash", "fish", "zsh"],
    }
    assert dict(zip(expected, offered(list(expected), environment), strict=True)) == expected


@pytest.mark.parametrize("text", ["contexts: [", "[]", "contexts: {1: 2}", "contexts: {x: [y]}\ncurrent: x"])
def test_a_file_of_contexts_that_is_wrong_offers_nothing_and_says_nothing(contexts_file: Path, text: str) -> None:
    contexts_file.write_text(text)
    context = click.Context(mfctl)
    context.params["context_name"] = None
    parameter = click.Option(["--context"])
    assert context_names(context, parameter, "") in ([], ["x"])
    assert service_names(context, parameter, "") == []


def test_bash_completes_paths_of_pools(environment: dict[str, str], tmp_path: Path) -> None:
    """At a terminal, since that is bash's own part."""
    (tmp_path / "pools" / "red-pool").mkdir(parents=True)
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    try:
        os.write(
            terminal, b"PS1='>'; bind 'set enable-bracketed-paste off'; source <(mfctl completion bash); echo up\n"
        )
        _read_until(terminal, b"\nup")
        os.write(terminal, f"mfctl pool status {tmp_path}/pools/re\t".encode())
        _read_until(terminal, b"red-pool/")
    finally:
        os.close(terminal)
        os.kill(child, 9)
        os.waitpid(child, 0)


def _read_until(terminal: int, wanted: bytes) -> None:
    seen, deadline_s = b"", time.monotonic() + _DEADLINE_S
    while wanted not in seen.replace(b"\r", b""):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))
        assert ready, f"{wanted!r} did not come: {seen!r}"
        seen += os.read(terminal, 4096)


@pytest.mark.parametrize(
    ("shell", "mark"),
    [("bash", "complete -o nosort -F _mfctl_completion mfctl"), ("zsh", "#compdef mfctl"), ("fish", "--command mfctl")],
)
def test_each_shell_has_its_script(shell: str, mark: str) -> None:
    script = CliRunner().invoke(mfctl, ["completion", shell])
    assert script.exit_code == 0
    assert mark in script.stdout
    assert f"_MFCTL_COMPLETE={shell}_complete" in script.stdout
    found = json.loads(CliRunner().invoke(mfctl, ["completion", shell, "--format", "json"]).stdout)
    assert found == {"shell": shell, "script": script.stdout.removesuffix("\n")}


def test_another_shell_is_wrong_usage() -> None:
    assert CliRunner().invoke(mfctl, ["completion", "tcsh"]).exit_code == 2
