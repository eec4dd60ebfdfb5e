"""Commands with a context: which service they ask, with what, and what a whole cluster answers side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.server_tls import ServerTls
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.telemetry.event_log import EventLog
from meshfusion.jbof.errors import ConfigError, ServiceUnavailableError
from meshfusion.tools.mfctl import service_access
from meshfusion.tools.mfctl.cluster import Answer, ask_all, end_with_errors
from meshfusion.tools.mfctl.context_file import change_contexts
from meshfusion.tools.mfctl.context_types import Access, Contexts, Member, ServiceContext
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.api.fake_service import FakeChunkService, make_status
from tests.dpu.security.authority import Authority, server_files
from tests.dpu.security.test_tls import known
from tests.dpu.telemetry.fakes import FakePool


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


def ran(*arguments: str) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@dataclass
class Fleet:
    """Two services that answer, and an address at which none does."""

    addresses: dict[str, str]
    pools: dict[str, FakePool]
    logs: dict[str, EventLog]

    def make_context(self, *names: str) -> None:
        members = [text for name in names for text in ("--member", f"{name}={self.addresses[name]}")]
        ran("context", "set", "fleet", *members, "--use")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    pools = {name: FakePool() for name in ("a", "b")}
    seconds = iter(range(1_700_000_000, 1_800_000_000))
    logs = {name: EventLog(unix_time_s=lambda: float(next(seconds))) for name in pools}
    servers = {
        name: serve(pool, f"unix://{tmp_path}/{name}", admin=pool, events=logs[name]) for name, pool in pools.items()
    }
    addresses = {name: server.address for name, server in servers.items()}
    yield Fleet({**addresses, "gone": f"unix://{tmp_path}/gone"}, pools, logs)
    for name, server in servers.items():
        logs[name].close()
        server.stop(0.0)


def test_contexts_are_set_listed_used_and_removed(contexts_file: Path) -> None:
    made = ran("context", "set", "lab", "--service", "unix:///run/s", "--token-file", "/t")
    assert (made["replaced"], made["current"]) == (False, False)
    assert yaml.safe_load(contexts_file.read_text())["contexts"] == {
        "lab": {"service": "unix:///run/s", "token_file": "/t"}
    }
    ran("context", "set", "two", "--member", "x=unix:///x", "--member", "y=unix:///y", "--use")
    assert ran("context", "list")["contexts"] == [
        {"name": "lab", "current": False, "services": [{"service": "lab", "address": "unix:///run/s"}]},
        {
            "name": "two",
            "current": True,
            "services": [{"service": "x", "address": "unix:///x"}, {"service": "y", "address": "unix:///y"}],
        },
    ]
    assert ran("context", "use", "lab")["current"] == "lab"
    assert ran("context", "set", "lab", "--service", "unix:///other")["replaced"] is True
    assert "token_file" not in contexts_file.read_text(), "it is replaced as a whole"
    gone = ran("context", "remove", "lab")
    assert (gone["removed"], gone["was_current"], gone["service"]) == ("lab", True, "unix:///other")
    assert [entry["current"] for entry in ran("context", "list")["contexts"]] == [False]


def test_a_relative_file_is_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ran("context", "set", "lab", "--service", "unix:///s", "--token-file", "t")["token_file"] == f"{tmp_path}/t"


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", "lab"],
        ["set", "lab", "--service", "unix:///s", "--member", "a=unix:///a"],
        ["set", "lab", "--member", "unix:///a"],
        ["set", "lab", "--member", "a=unix:///a", "--member", "a=unix:///b"],
    ],
)
def test_wrong_usage_changes_nothing(contexts_file: Path, arguments: list[str]) -> None:
    result = run("context", *arguments)
    assert result.exit_code == 2
    assert not contexts_file.exists()


@pytest.mark.parametrize(
    "arguments",
    [["use", "x"], ["remove", "x"], ["show", "x"], ["show"], ["set", "lab", "--service", "far:7000"]],
)
def test_what_cannot_be_is_refused_with_a_next_step(contexts_file: Path, arguments: list[str]) -> None:
    result = run("context", *arguments)
    assert result.exit_code == 1
    assert "next step: " in result.stderr
    assert not contexts_file.exists()


def test_the_files_of_a_context_are_looked_at(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("open-to-all\n")
    token.chmod(0o644)
    ran("context", "set", "lab", "--service", "unix:///s", "--token-file", str(token), "--use")
    shown = run("context", "show")
    assert shown.exit_code == 1
    assert f"token_file = {token}: " in shown.stdout
    assert "open-to-all" not in shown.output


def test_a_command_asks_the_service_of_the_context(fleet: Fleet) -> None:
    ran("context", "set", "lab", "--service", fleet.addresses["a"], "--use")
    asked = ran("pool", "status", "--service", fleet.addresses["a"])
    assert ran("pool", "status") == asked, "one service answers as it does by its address"
    ran("context", "set", "none", "--service", fleet.addresses["gone"], "--use")
    assert run("pool", "status").exit_code == 5
    assert ran("--context", "lab", "pool", "status") == asked
    assert ran("pool", "status", "--service", fleet.addresses["a"]) == asked, "what is named comes first"


def test_neither_pool_nor_service_nor_context_is_wrong_usage() -> None:
    for command in (
        ["pool", "status"],
        ["events"],
        ["top"],
        ["chunk", "list"],
        ["service", "status"],
        ["path", "test"],
    ):
        result = run(*command)
        assert result.exit_code == 2, command
        assert "mfctl context use NAME" in result.stderr


def test_a_context_beside_what_else_names_a_service_is_wrong_usage(fleet: Fleet, tmp_path: Path) -> None:
    fleet.make_context("a")
    for command in (
        ["pool", "status", "/x"],
        ["service", "status", "--config", "/x"],
        ["support", "dump", "/x"],
    ):
        result = run("--context", "fleet", *command)
        assert result.exit_code == 2, command
        assert "--context" in result.stderr
    assert run("--context", "other", "pool", "status").exit_code == 1


def test_a_wrong_file_of_contexts_is_told_when_it_is_needed(contexts_file: Path, fleet: Fleet) -> None:
    contexts_file.write_text("contexts: {a: {sevice: x}}")
    contexts_file.chmod(0o600)
    result = run("pool", "status")
    assert result.exit_code == 1
    assert "unknown key" in result.stderr


def test_all_services_of_a_cluster_side_by_side(fleet: Fleet) -> None:
    fleet.make_context("a", "b")
    table = run("pool", "status")
    assert table.exit_code == 0
    assert [line.split()[0] for line in table.stdout.splitlines()] == ["SERVICE", "a", "b"]
    found = ran("pool", "status")
    assert found["context"] == "fleet"
    for entry in found["services"]:
        alone = ran("pool", "status", "--service", entry["service"])
        assert entry == {
            "service": entry["service"],
            "address": fleet.addresses[entry["service"]],
            "answer": alone,
            "error": None,
        }


@pytest.mark.parametrize("command", [["pool", "status"], ["events"], ["top", "--once", "--interval", "0.1"]])
def test_one_that_does_not_answer_is_told_beside_the_others(fleet: Fleet, command: list[str]) -> None:
    fleet.make_context("a", "gone", "b")
    shown = run(*command)
    assert shown.exit_code == 5
    assert "error: gone: the chunk service at " in shown.stderr
    assert "next step: " in shown.stderr
    found = run(*command, "--format", "json")
    assert found.exit_code == 5
    services = json.loads(found.stdout)["services"]
    assert [entry["error"] is None for entry in services] == [True, False, True]
    assert [entry["answer"] is None for entry in services] == [False, True, False]
    assert services[1]["error"]["exit_code"] == 5
    assert services[1]["error"]["next_step"]


def test_a_command_about_one_service_does_not_choose_among_several(fleet: Fleet) -> None:
    fleet.make_context("a", "b")
    for command in (["chunk", "list"], ["service", "reload"], ["path", "test"], ["support", "dump"]):
        result = run(*command)
        assert result.exit_code == 2, command
        assert "--service a or b" in result.stderr
    wrong = run("chunk", "list", "--service", "c")
    assert wrong.exit_code == 1
    assert "has no service 'c': a, b" in wrong.stderr


def test_a_drain_needs_its_service_on_the_line(fleet: Fleet) -> None:
    """The current context is that of some earlier day."""
    ran("context", "set", "lab", "--service", fleet.addresses["gone"], "--use")
    refused = run("service", "drain")
    assert refused.exit_code == 2
    assert "mfctl --context NAME" in refused.stderr
    assert run("--context", "lab", "service", "drain").exit_code == 5, "it went there"


def test_events_of_all_are_in_the_order_of_their_time(fleet: Fleet) -> None:
    fleet.make_context("a", "b")
    for name in ("a", "b", "a"):
        fleet.logs[name].tell("saves_stopped", f"of {name}")
    lines = run("events").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["SERVICE", "a", "b", "a"]
    assert run("events", "--after", "1").exit_code == 2, "sequences are of one service each"


@pytest.mark.parametrize("output_format", ["table", "json", "yaml"])
def test_events_of_all_are_followed_until_the_last_service_ends(fleet: Fleet, output_format: str) -> None:
    fleet.make_context("a", "gone", "b")
    for name, log in fleet.logs.items():
        log.tell("saves_stopped", f"of {name}")
        log.close()
    result = run("events", "--follow", "--format", output_format)
    assert result.exit_code == 5
    assert ("of a" in result.stdout, "of b" in result.stdout) == (True, True)
    assert "gone" in result.stderr
    if output_format == "json":
        assert {json.loads(line)["service"] for line in result.stdout.splitlines()} == {"a", "b"}
    if output_format == "yaml":
        assert {document["service"] for document in yaml.safe_load_all(result.stdout)} == {"a", "b"}


def test_what_a_context_names_is_shown_to_its_own_services_alone(
    contexts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token goes to whom it is for, also when another service is named beside the context."""
    own = Member("lab", "unix:///own", Access(token_file=Path("/own-token")))
    change_contexts(contexts_file, lambda _: Contexts("lab", {"lab": ServiceContext("lab", (own,))}))
    assert service_access.access_to("unix:///own").token_file is None, "no command runs"
    now = service_access.Calling({}, None)
    monkeypatch.setattr(service_access, "calling", lambda: now)
    assert service_access.access_to("unix:///own").token_file == Path("/own-token")
    assert service_access.access_to("unix:///other").token_file is None
    assert service_access.given_access_to("unix:///own").token_file is None
    now = service_access.Calling({"token_file": Path("/given"), "ca": Path("/ca")}, None)
    assert service_access.access_to("unix:///own").token_file == Path("/given"), "the line comes first"
    assert service_access.access_to("unix:///own").ca is None


def test_a_bad_file_is_called_by_where_it_is_named(fleet: Fleet, tmp_path: Path) -> None:
    missing = tmp_path / "no-token"
    ran("context", "set", "lab", "--service", fleet.addresses["a"], "--token-file", str(missing), "--use")
    told = run("pool", "status")
    assert told.exit_code == 1
    assert f"context: token_file of lab = {missing}" in told.stderr


def test_one_that_hangs_keeps_nobody_waiting() -> None:
    members = (Member("quick", "unix:///q"), Member("slow", "unix:///s"))
    began_s = time.monotonic()
    answers = ask_all(members, lambda member: time.sleep(60) if member.name == "slow" else 7, within_s=0.2)
    assert time.monotonic() - began_s < 30
    assert (answers[0].value, answers[0].error) == (7, None)
    assert answers[1].value is None
    assert "did not answer within 0.2 s" in str(answers[1].error)


def test_a_defect_is_not_hidden_among_answers() -> None:
    with pytest.raises(ZeroDivisionError):
        ask_all((Member("a", "unix:///a"),), lambda _: 1 // 0, within_s=5.0)


def test_the_exit_code_tells_that_one_cannot_be_reached() -> None:
    member, refused = Member("a", "unix:///a"), ConfigError("refused", next_step="Do.")
    end_with_errors([Answer(member, 1)])
    away = ServiceUnavailableError("away", next_step="Start it.")
    for failed, code in (([refused], 1), ([refused, away], 5), ([away], 5)):
        with pytest.raises(click.exceptions.Exit) as raised:
            end_with_errors([Answer(member, 1), *(Answer(member, error=error) for error in failed)])
        assert raised.value.exit_code == code


def test_a_cluster_over_tls_is_called_with_the_files_of_its_context(tmp_path: Path) -> None:
    """One that does not know this caller is told beside the one that does; neither is called without the files."""
    authority = Authority(tmp_path)
    pair, of_server = authority.issue("operator"), server_files(authority, authority)
    knows, knows_not = (
        serve(FakeChunkService(), "127.0.0.1:0", guard=Guard(known(name)), tls=ServerTls(of_server))
        for name in ("operator", "somebody")
    )
    try:
        files = ("--ca", str(authority.path), "--certificate", str(pair.certificate), "--key", str(pair.key))
        members = ("--member", f"one={knows.address}", "--member", f"two={knows_not.address}")
        ran("context", "set", "secure", *members, *files, "--use")
        assert run("context", "show").exit_code == 0
        found = run("pool", "status", "--format", "json")
        assert found.exit_code == 1, "it can be reached, and refuses"
        one, two = json.loads(found.stdout)["services"]
        assert (one["answer"]["pool_uuid"], one["error"]) == (make_status().pool_uuid, None)
        assert (two["answer"], two["error"]["kind"]) == (None, "PermissionDeniedError")
        alone = run("pool", "status", "--service", "one")
        assert alone.exit_code == 0, "by its name, with the same files"
        ran("context", "set", "bare", "--service", knows.address, "--use")
        assert run("pool", "status").exit_code == 5, "without TLS it is not understood"
    finally:
        for server in (knows, knows_not):
            server.stop(0.0)
