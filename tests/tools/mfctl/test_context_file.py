"""The file of contexts: where it is, what is refused in it, and that a change is whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import yaml

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.context_file import change_contexts, contexts_path, read_contexts
from meshfusion.tools.mfctl.context_types import Access, Contexts, Member, ServiceContext

FLEET = """
current: fleet
contexts:
  lab: {service: "unix:///run/s", token_file: /t}
  fleet:
    ca: /ca.pem
    token_file: /fleet-token
    services:
      a: {address: "dpu-a:7000"}
      b: {address: "dpu-b:7000", server_name: b.example, token_file: /b-token}
      here: {address: "unix:///run/here"}
"""


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def refusal(path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        read_contexts(written(path, text))
    assert raised.value.next_step
    return raised.value.message


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MFCTL_CONFIG": "/a/b", "XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/mfctl/contexts.yaml"),
        ({"XDG_CONFIG_HOME": "x", "HOME": "/h"}, "/h/.config/mfctl/contexts.yaml"),
        ({"MFCTL_CONFIG": "", "HOME": "/h"}, "/h/.config/mfctl/contexts.yaml"),
    ],
)
def test_where_it_is(environment: dict[str, str], expected: str) -> None:
    """As the XDG Base Directory Specification has it: a path there that is not absolute is ignored."""
    assert contexts_path(environment) == Path(expected)


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"MFCTL_CONFIG": "here.yaml", "HOME": "/h"}])
def test_where_it_is_is_told_when_it_is_not_known(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"MFCTL_CONFIG|HOME") as raised:
        contexts_path(environment)
    assert raised.value.next_step


def test_no_file_is_no_contexts(tmp_path: Path) -> None:
    assert read_contexts(tmp_path / "none" / "contexts.yaml") == Contexts()
    assert read_contexts(written(tmp_path / "empty", "# nothing yet\n")) == Contexts()


def test_what_a_context_says_for_all_is_for_each_that_it_fits(tmp_path: Path) -> None:
    found = read_contexts(written(tmp_path / "c", FLEET))
    assert found.current == "fleet"
    lab, fleet = found.by_name["lab"], found.by_name["fleet"]
    assert (lab.is_cluster, lab.members) == (False, (Member("lab", "unix:///run/s", Access(token_file=Path("/t"))),))
    assert fleet.is_cluster
    assert fleet.members == (
        Member("a", "dpu-a:7000", Access(ca=Path("/ca.pem"), token_file=Path("/fleet-token"))),
        Member(
            "b",
            "dpu-b:7000",
            Access(ca=Path("/ca.pem"), server_name="b.example", token_file=Path("/b-token")),
        ),
        Member("here", "unix:///run/here", Access(token_file=Path("/fleet-token"))),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("contexts: {a: {service: 'unix:///s', token: abc}}", "contexts.a.token: unknown key"),
        ("contexts: {a: {servcie: 'unix:///s'}}", "did you mean contexts.a.service"),
        ("context: {}", "unknown key"),
        ("contexts: {a: {service: 7000}}", "contexts.a.service"),
        ("contexts: {a: {service: nowhere}}", "is not an address of a chunk service"),
        ("contexts: {a: {}}", "either service or services"),
        ("contexts: {a: {service: 'unix:///s', services: {b: {address: 'unix:///b'}}}}", "either service or services"),
        ("contexts: {a: {services: {}}}", "contexts.a.services"),
        ("contexts: {a: {services: {b: {}}}}", "contexts.a.services.b.address: is missing"),
        ("contexts: {a: {services: {'b:1': {address: 'unix:///b'}}}}", "a name that cannot be used"),
        ("contexts: {'../a': {service: 'unix:///s'}}", "a name that cannot be used"),
        ("contexts: {a: {service: 'unix:///s', token_file: token}}", "is not an absolute path"),
        ("contexts: {a: {service: 'unix:///s', ca: /ca}}", "is for TLS"),
        ("contexts: {a: {service: 'far.example:7000'}}", "without TLS anybody on the way could be it"),
        ("contexts: {a: {service: 'h:1', ca: /ca, certificate: /c}}", "belong together"),
        ("contexts: {a: {services: {b: {address: 'unix:///s'}, c: {address: 'unix:///s'}}}}", "the address of b too"),
        ("current: b\ncontexts: {a: {service: 'unix:///s'}}", "names no context"),
        ("contexts: {a: {service: 'unix:///s'}, a: {service: 'unix:///t'}}", "stands twice"),
        ("[1]", "mapping"),
        ("contexts: {a: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_anywhere_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path / "c", text)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path / "c", "current: x\ncontexts:\n  a: {service: 'h:1'}\n  b: {}\n")
    assert "3 problems" in message
    assert "line 3" in message


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "c", FLEET, mode)
    with pytest.raises(ConfigError, match="others can change it") as raised:
        read_contexts(path)
    assert raised.value.next_step == f"chmod go-w {path}"
    path.chmod(0o644)
    assert read_contexts(path).current == "fleet", "it holds no secret"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "c", FLEET)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if owner == 0:
        assert read_contexts(path).current == "fleet", "root may have made it for all"
        os.chown(path, 1234, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_contexts(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "contexts.yaml"
    found = read_contexts(written(tmp_path / "c", FLEET))
    assert change_contexts(path, lambda _: found) == found
    assert read_contexts(path) == found
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["contexts.yaml"]


def test_what_would_be_refused_is_not_written(tmp_path: Path) -> None:
    path = written(tmp_path / "c", FLEET)
    far = ServiceContext("far", (Member("far", "far.example:7000"),))
    with pytest.raises(ConfigError, match=r"contexts\.far"):
        change_contexts(path, lambda contexts: contexts.with_context(far))
    assert path.read_text() == FLEET
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = written(tmp_path / "elsewhere" / "c", FLEET)
    link = tmp_path / "link"
    link.symlink_to(real)
    change_contexts(link, lambda contexts: contexts.without("fleet"))
    assert link.is_symlink()
    assert yaml.safe_load(real.read_text())["current"] == ""


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def add(number: int) -> None:
        made = ServiceContext(f"c{number}", (Member(f"c{number}", f"unix:///s{number}"),))
        change_contexts(path, lambda contexts: contexts.with_context(made))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_contexts(path).by_name) == {f"c{number}" for number in range(8)}
