"""Every command in the documents is one that there is; and the check would find one that is not."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from meshfusion.tools.mfctl.config_model import config_alone
from meshfusion.tools.mfctl.main import meshfusion, mfctl
from tests.tools.docs_commands import Shown, problem, shown_commands

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"mfctl": mfctl, "meshfusion": meshfusion}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_are_taken(path: Path) -> None:
    text = path.read_text()
    found = [(shown, problem(shown, PROGRAMS)) for shown in shown_commands(text, PROGRAMS)]
    wrong = [f"{path.name}:{shown.line}: {shown}: {why}" for shown, why in found if why]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "least"), [("runbooks.md", 30), ("deployment.md", 20), ("operation.md", 1)])
def test_documents_show_commands(name: str, least: int) -> None:
    """Else the check above would check nothing."""
    shown = list(shown_commands((ROOT / "docs" / name).read_text(), PROGRAMS))
    assert sum(each.is_whole for each in shown) >= least


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        other = path if not file else (path.parent / file).resolve()
        assert other.exists(), f"{path.name} leads to {target}"
        if anchor and other.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{path.name} leads to {target}"


def configurations(text: str) -> list[str]:
    """Of a service, whole: blocks that say where it listens and what its pool is."""
    blocks = re.findall(r"^( *)```yaml\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    texts = [textwrap.dedent(body) for _, body in blocks]
    return [text for text in texts if re.search(r"^listen:", text, re.MULTILINE) and "pool" in text]


def test_configurations_in_documents_are_taken(tmp_path: Path) -> None:
    """By the service's model; whether certificates and directories are there only their machine knows."""
    count = 0
    for path in DOCUMENTS:
        for text in configurations(path.read_text()):
            file = tmp_path / "service.yaml"
            file.write_text(text)
            config_alone(file)
            count += 1
    assert count >= 4


def block(*lines: str) -> list[Shown]:
    return list(shown_commands("\n".join(["```sh", *lines, "```"]), PROGRAMS))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("mfctl pool stauts /p", "No such command"),
        ("mfctl pool status /p --formats json", "No such option"),
        ("mfctl pool status /p --format xml", "Invalid value"),
        ("mfctl pool check", "Missing argument"),
        ("mfctl service run", "Missing option"),
        ("mfctl jbof drain /p one", "not a valid integer"),
        ("mfctl pool check /p /q", "unexpected extra argument"),
        ("mfctl pool", "alone is no command"),
        ("sudo mfctl pool stauts /p", "No such command"),
        ("kubectl exec x -- mfctl pool stauts /p", "No such command"),
        ("A=1 .venv/bin/mfctl pool stauts /p", "No such command"),
        ("true && mfctl pool stauts /p > x", "No such command"),
        ("meshfusion --confg x", "No such option"),
        ("mfctl pool \\\n  stauts /p", "No such command"),
    ],
)
def test_a_command_that_there_is_not_is_found(line: str, told: str) -> None:
    (shown,) = block("# a comment, mfctl none", line)
    assert told in problem(shown, PROGRAMS)
    assert shown.line == 3


@pytest.mark.parametrize(
    "line",
    [
        "mfctl jbof drain /p 1 && mfctl pool status --service unix:///run/s | less",
        "mfctl lab run -- python x.py --no-such-option",
        "mfctl --service-ca ca.pem connector config --service 10.0.0.1:7700",
        "mfctl token create monitor --role read-only --output monitor.token >> tokens.yaml",
        "sudo install -d /var/lib/meshfusion",
        "mfctl --version",
    ],
)
def test_what_is_taken_is_not_complained_of(line: str) -> None:
    assert [problem(shown, PROGRAMS) for shown in block(line)] in ([], [""], ["", ""])


def test_commands_that_are_only_named_have_to_exist() -> None:
    def named(text: str) -> list[str]:
        return [problem(shown, PROGRAMS) for shown in shown_commands(text, PROGRAMS)]

    assert named("see `mfctl service status|drain`, `mfctl pool check`, or `mfctl dpu flash --dry-run`") == ["", "", ""]
    assert named("see `mfctl service status|drains`") == ["there is no command drains in service"]
    assert named("see `mfctl pool check --fast`") == ["there is no option --fast of check"]
    assert named("```\nnot of the shell: mfctl nothing\n```\n") == []
