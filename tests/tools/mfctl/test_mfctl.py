"""mfctl's commands, as a user meets them: output in both formats, errors with their next step and exit code."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

import meshfusion.dpu.pool as pool_module
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.pool import CheckReport
from meshfusion.jbof.errors import FormatError, MediaError, PoolBusyError, ServiceUnavailableError
from meshfusion.tools.mfctl.main import meshfusion, mfctl
from tests.dpu.api.fake_service import FakeChunkService, make_chunk, make_status


def run(*arguments: str) -> Result:
    return CliRunner().invoke(mfctl, list(arguments))


def parse_error(result: Result) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(result.stderr)["error"]
    assert error["exit_code"] == result.exit_code
    assert error["next_step"]
    return error


@pytest.fixture
def service() -> FakeChunkService:
    return FakeChunkService(tuple(make_chunk(number) for number in range(1, 8)))


@pytest.fixture
def address(service: FakeChunkService, tmp_path: Path) -> Iterator[str]:
    server = serve(service, f"unix://{tmp_path}/s")
    yield server.address
    server.stop(0.0)


def test_help_lists_the_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for line in ("3  the pool is in use", "4  the pool is damaged", "5  the service cannot"):
        assert line in result.output


def test_help_does_not_wait_for_heavy_libraries() -> None:
    """Import names, not seconds: a loaded machine must not fail this."""
    heavy = ["torch", "vllm", "numba", "numpy", "pydantic", "grpc", "rich", "lmdb", "yaml"]
    code = f"import sys, meshfusion.tools.mfctl.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def commands(group: click.Group, *name: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for child_name, child in group.commands.items():
        at = (*name, child_name)
        yield from commands(child, *at) if isinstance(child, click.Group) else [(at, child)]


def test_every_command_has_help_and_all_formats() -> None:
    names = [name for name, _ in commands(mfctl)]
    assert len(names) > 25
    assert {("jbof", "drives"), ("pool", "create"), ("lab", "run"), ("sim",)} <= set(names)
    for name in names:
        result = run(*name, "--help")
        assert result.exit_code == 0
        assert "--format [table|json|yaml]" in result.output, name
    assert "--config" in CliRunner().invoke(meshfusion, ["--help"]).output


def test_no_option_is_without_words() -> None:
    for name, command in commands(mfctl):
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, (name, option.name)


@pytest.mark.parametrize("arguments", [["--format", "yaml"], ["--format=yaml"]])
def test_yaml_says_what_json_says(service: FakeChunkService, address: str, arguments: list[str]) -> None:
    for command in (["pool", "status", "--service", address], ["chunk", "list", "--service", address]):
        shown = run(*command, *arguments)
        assert shown.exit_code == 0
        assert yaml.safe_load(shown.stdout) == json.loads(run(*command, "--format", "json").stdout)
        assert not shown.stdout.startswith("{")


def test_errors_come_as_yaml_too(tmp_path: Path) -> None:
    missing, usage = ["pool", "status", str(tmp_path / "none")], ["pool", "status"]
    for command in (missing, usage):
        result = run(*command, "--format", "yaml")
        assert result.stdout == ""
        told = yaml.safe_load(result.stderr)
        assert told == json.loads(run(*command, "--format", "json").stderr)
        assert told["error"]["exit_code"] == result.exit_code != 0


def test_status_of_a_service(service: FakeChunkService, address: str) -> None:
    result = run("pool", "status", "--service", address)
    assert result.exit_code == 0
    assert "capacity  4.0 GiB" in result.output
    assert "60 free, 4 in use (1 open, 3 sealed); " in result.output
    assert "saves     accepted" in result.output
    assert "h-1     live   local   vllm 0.32.0  box   4242  2       1       0.2 s" in result.output
    as_json = json.loads(run("pool", "status", "--service", address, "--format", "json").output)
    expected = dataclasses.asdict(service.current_status)
    assert as_json == {**expected, "holders": list(expected["holders"]), "segments_used": 4, "counters": {
        "hits": 5, "commits": 12
    }}  # fmt: skip


def test_stopped_saves_are_shouted(service: FakeChunkService, address: str) -> None:
    service.current_status = make_status(saves_stopped_reason="quarantine is full")
    assert "STOPPED: quarantine is full" in run("pool", "status", "--service", address).output


def test_names_from_elsewhere_cannot_move_the_cursor(service: FakeChunkService, address: str) -> None:
    holder = dataclasses.replace(make_status().holders[0], host="evil\x1b[2J")
    service.current_status = make_status(holders=(holder,))
    assert "\x1b" not in run("pool", "status", "--service", address).output


def test_status_of_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool_module, "inspect_pool", lambda path: make_status(path=str(path), holders=()))
    result = run("pool", "status", str(tmp_path))
    assert result.exit_code == 0
    assert f"path      {tmp_path}" in result.output
    assert "leases" not in result.output, "the medium does not know them"
    assert "60 free, 4 in use\n" in result.output, "as many as of its service, but not which of them are open"


def test_an_unreachable_service_exits_5(tmp_path: Path) -> None:
    result = run("pool", "status", "--service", f"unix://{tmp_path}/none", "--format", "json")
    assert result.exit_code == 5
    assert parse_error(result)["kind"] == "ServiceUnavailableError"
    assert result.stdout == ""
    text = run("chunk", "list", "--service", f"unix://{tmp_path}/none")
    assert text.exit_code == 5
    assert text.stderr.startswith("error: the chunk service at unix://")
    assert "next step: " in text.stderr
    assert "Traceback" not in text.stderr


def test_a_slow_service_exits_5(service: FakeChunkService, address: str) -> None:
    service.delay_s = 1.0
    result = run("pool", "status", "--service", address, "--timeout", "0.05")
    assert result.exit_code == 5
    assert "did not answer" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PoolBusyError("in use", next_step="Wait."), 3),
        (FormatError("foreign", next_step="Create."), 4),
        (MediaError("broken", next_step="Look."), 1),
    ],
)
def test_errors_of_the_pool_have_their_codes(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(pool_module, "inspect_pool", fail)
    assert run("pool", "status", "/x").exit_code == code
    assert parse_error(run("pool", "status", "/x", "--format=json"))["kind"] == type(error).__name__


@pytest.mark.parametrize(
    "arguments",
    [
        ["pool", "status"],
        ["pool", "status", "/x", "--service", "unix:///y"],
        ["pool", "create", "/x"],
        ["pool", "create", "/x", "--size", "4G"],
        ["chunk", "show", "abc", "/x"],
        ["chunk", "show", "", "/x"],
        ["chunk", "list", "/x", "--after", "zz"],
        ["chunk", "list", "/x", "--limit", "0"],
        ["service", "run"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    if len(arguments) > 1:
        assert parse_error(run(*arguments, "--format", "json"))["exit_code"] == 2


def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pool_module, "inspect_pool", fail)
    assert isinstance(run("pool", "status", "/x").exception, ZeroDivisionError)


def test_chunks_of_a_service(address: str) -> None:
    result = run("chunk", "list", "--service", address, "--limit", "2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["KEY", "IDENTITY", "TENANT", "GROUP", "POSITION", "TOKENS", "SHARDS", "BYTES"]
    assert lines[1].split() == [make_chunk(1).key.hex(), "11" * 6, "default", "0", "64", "64", "1", "131072"]
    assert len(lines) == 3
    assert f"--after {make_chunk(2).key.hex()}" in result.stderr


def test_chunks_page_by_page(service: FakeChunkService, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.tools.mfctl.chunk_commands._PAGE_LIMIT", 2)
    listed = json.loads(run("chunk", "list", "--service", address, "--limit", "5", "--format", "json").output)
    assert [int(c["key"], 16) for c in listed["chunks"]] == [1, 2, 3, 4, 5]
    assert [request.limit for name, request in service.calls if name == "list_chunks"] == [2, 2, 1]  # type: ignore[attr-defined]
    rest = run("chunk", "list", "--service", address, "--after", listed["next_after_key"], "--format", "json")
    assert [int(c["key"], 16) for c in json.loads(rest.output)["chunks"]] == [6, 7]
    assert json.loads(rest.output)["next_after_key"] == ""


def test_chunks_of_an_identity(service: FakeChunkService, address: str) -> None:
    other = make_chunk(9, identity=b"\x22" * 32)
    service.chunks[other.key] = other
    result = run("chunk", "list", "--service", address, "--identity", "22" * 32, "--format", "json")
    assert [int(c["key"], 16) for c in json.loads(result.output)["chunks"]] == [9]


def test_one_chunk(address: str) -> None:
    key = make_chunk(3).key.hex()
    result = run("chunk", "show", key, "--service", address)
    assert result.exit_code == 0
    assert "segment        3, generation 7" in result.output
    assert "blocks         192 to 225 (payload from 193)" in result.output
    assert "units          4 of 32768 bytes, 8 blocks apart" in result.output
    shown = json.loads(run("chunk", "show", key, "--service", address, "--format", "json").output)
    assert shown["shards"][0]["extent"]["generation"] == 7
    assert shown["shards"][0]["unit_digests"][0] == (3000).to_bytes(8, "little").hex()
    missing = run("chunk", "show", "ff" * 32, "--service", address)
    assert missing.exit_code == 1
    assert "there is no chunk" in missing.stderr


def check_report(damaged: tuple[str, ...], index_damaged: int = 0) -> Callable[..., CheckReport]:
    def check(path: Path, progress: Callable[[int, int], None], *, rate_bytes_s: float | None) -> CheckReport:
        progress(5, 10)
        return CheckReport(7, 7 << 20, damaged, index_damaged)

    return check


def test_a_sound_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "check_pool", check_report(()))
    result = run("pool", "check", "/x")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "checked 7 chunks, 7.0 MiB\n", "")


def test_a_damaged_pool_exits_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "check_pool", check_report(("chunk 00ab: unit 3",)))
    result = run("pool", "check", "/x")
    assert result.exit_code == 4
    assert "damaged: chunk 00ab: unit 3" in result.stdout
    as_json = run("pool", "check", "/x", "--format", "json")
    assert json.loads(as_json.stdout)["damaged"] == ["chunk 00ab: unit 3"]
    assert parse_error(as_json)["kind"] == "FormatError"


def test_a_damaged_index_exits_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "check_pool", check_report((), 2))
    result = run("pool", "check", "/x")
    assert result.exit_code == 4
    assert "2 entries of the index are damaged" in result.stderr


def test_config_check_tells_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"listen: unix://{tmp_path}/s\npool: {{paht: /x}}\nlog: {{level: loud}}\n")
    result = run("config", "check", str(file))
    assert result.exit_code == 1
    assert "2 problems" in result.stderr
    assert "pool.paht: unknown key; did you mean pool.path?" in result.stderr
    problems = parse_error(run("config", "check", str(file), "--format", "json"))["problems"]
    assert {(p["field"], p["line"]) for p in problems} == {("pool.paht", 2), ("log.level", 3)}
    file.write_text(f"listen: unix://{tmp_path}/s\npool: {{path: {tmp_path}/p, create: true, size: 257MiB}}\n")
    assert run("config", "check", str(file)).output == f"{file}: ok\n"


GOOD_CONNECTOR = {
    "kv_connector": "MeshFusionConnector",
    "kv_connector_module_path": "meshfusion.host.connector.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"service": "unix:///run/meshfusion.sock"},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"kv_role": "both"}, "kv_role = 'both'"),
        ({"kv_connector": None}, "kv_connector: is not this connector; write MeshFusionConnector"),
        ({"kv_connector_module_path": "x"}, "write meshfusion.host.connector.vllm"),
        ({"kv_rloe": "kv_both"}, "kv_rloe = 'kv_both': unknown key; did you mean kv_role?"),
        ({"kv_connector_extra_config": {"service": "unix:relative"}}, "does not name an absolute socket path"),
        ({"kv_role": "x", "kv_connector_extra_config": {"servce": "y"}}, "servce"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy = 'fail': must be recompute"),
        ({"kv_connector_extra_config": {"servce": "unix:///x"}}, "servce"),
        ({"kv_connector_extra_config": [1]}, "must be a mapping"),
        (
            {"kv_connector_extra_config": {"service": "unix:///x", "audit.share": 0.01}},
            '.audit.share: unknown key; write the one inside the other: "audit": {"share": 0.01}',
        ),
        (
            {"kv_connector_extra_config": {"pool.path": "/x"}},
            '.pool.path: unknown key; write the one inside the other: "pool": {"path": "/x"}',
        ),
    ],
)
def test_config_check_of_a_connector(tmp_path: Path, changes: dict[str, object], message: str | None) -> None:
    for dump in (json.dumps, yaml.safe_dump):
        file = tmp_path / "kv"
        file.write_text(dump({**GOOD_CONNECTOR, **changes}))
        result = run("config", "check", "--connector", str(file))
        if message is None:
            assert result.output == f"{file}: ok\n"
        else:
            assert result.exit_code == 1
            assert message in result.stderr


def check_connector(tmp_path: Path, pool: Mapping[str, object], *, whole: bool = False) -> Result:
    file = tmp_path / "kv.yaml"
    extra = {"pool": dict(pool)}
    file.write_text(yaml.safe_dump({**GOOD_CONNECTOR, "kv_connector_extra_config": extra} if whole else extra))
    return run("config", "check", "--connector", str(file))


@pytest.mark.parametrize("whole", [True, False])
def test_config_check_of_a_connector_looks_at_the_place_of_its_pool(tmp_path: Path, whole: bool) -> None:
    at = "kv_connector_extra_config.pool" if whole else "pool"
    path = tmp_path / "pool"
    assert check_connector(tmp_path, {"path": str(path), "size": "257MiB"}, whole=whole).exit_code == 0
    for pool, message in (
        ({"path": str(tmp_path / "a" / "b")}, f": the directory {tmp_path}/a does not exist; mkdir -p {tmp_path}/a"),
        ({"path": str(path), "size": "512TiB"}, f"{at}.size = '512TiB': is more than the "),
        ({"path": str(path), "size": "64MiB"}, f"{at}.size = '64MiB': pool size 64MiB is too small"),
        ({"path": str(path), "sise": "64MiB"}, f"{at}.sise: unknown key; did you mean {at}.size?"),
    ):
        result = check_connector(tmp_path, pool, whole=whole)
        assert result.exit_code == 1
        assert message in result.stderr
        assert ": 1 problem\n" in result.stderr
    assert not path.exists()


def test_config_check_of_a_pool_that_exists(tmp_path: Path) -> None:
    path, file = tmp_path / "pool", tmp_path / "s.yaml"
    assert run("pool", "create", str(path), "--size", "6MiB", "--segment-size", "1MiB").exit_code == 0
    file.write_text(f"listen: unix://{tmp_path}/s\npool: {{path: {path}, size: 9MiB}}\n")
    note = f"note: pool.size = 9MiB has no effect: the pool {path} exists already, with a size of 6MiB\n"
    assert run("config", "check", str(file)).stdout == f"{note}{file}: ok\n"
    assert json.loads(run("config", "check", str(file), "--format", "json").stdout)["notes"] == [note[6:-1]]
    connector = {"path": str(path), "size": "290MiB"}
    assert "note: pool.size = 290MiB has no effect" in check_connector(tmp_path, connector).stdout
    with (path / "data").open("r+b") as data:
        data.seek(8)
        data.write(b"\x09")
    status = run("pool", "status", str(path))
    assert status.exit_code == 4
    cause = status.stderr.splitlines()[0].removeprefix("error: ")
    assert "format version 9" in cause
    for result in (run("config", "check", str(file)), check_connector(tmp_path, connector)):
        assert result.exit_code == 1
        assert cause in result.stderr


def test_config_check_says_that_a_policy_nobody_set_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    file.write_text(json.dumps({k: v for k, v in GOOD_CONNECTOR.items() if k != "kv_load_failure_policy"}))
    result = run("config", "check", "--connector", str(file))
    assert "kv_load_failure_policy: is not set, and vLLM's default is 'fail': it must be recompute" in result.stderr


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ('{"service": "unix:///x",\n "path": "auto"', "line 2, column 16: not valid JSON: Expecting ','", "closing"),
        ('{"service": "unix:///x" "path": 1}', "line 1, column 25: not valid JSON: Expecting ','", "a comma between"),
        ('{"service":\n\t"unix:///x"}', "is JSON with tabs between its entries", "Indent it with spaces"),
    ],
)
def test_json_that_does_not_parse_gets_advice_on_json(tmp_path: Path, text: str, problem: str, fix: str) -> None:
    for name in ("kv.json", "kv"):
        (tmp_path / name).write_text(text)
        result = run("config", "check", "--connector", str(tmp_path / name))
        assert result.exit_code == 1
        assert problem in result.stderr
        assert fix in result.stderr
    (tmp_path / "kv.yaml").write_text(text)
    assert "not valid YAML" in run("config", "check", "--connector", str(tmp_path / "kv.yaml")).stderr


def test_config_check_of_the_extra_config_alone(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(GOOD_CONNECTOR["kv_connector_extra_config"]))
    assert run("config", "check", "--connector", str(file)).exit_code == 0


def test_config_example_is_yaml_and_json() -> None:
    text = run("config", "example").output
    assert json.loads(run("config", "example", "--format", "json").output) == yaml.safe_load(text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    result = run("config", "check", str(tmp_path / "none.yaml"))
    assert result.exit_code == 1
    assert "no such file" in result.stderr


def test_output_closed_by_its_reader_is_no_error(address: str) -> None:
    """As in ``mfctl chunk list | head -1``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "meshfusion.tools.mfctl.main", "chunk", "list", "--service", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    reader = threading.Timer(20.0, process.kill)
    reader.start()
    assert "Traceback" not in process.stderr.read()
    process.wait()
    reader.cancel()


def run_program(function: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv = ['x', *{list(arguments)}]; import meshfusion.tools.mfctl.main as m; m.{function}()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_bare_programs_say_how_they_are_used() -> None:
    bare = run_program("main")
    assert "Usage: mfctl" in bare.stdout + bare.stderr
    daemon = run_program("service_main")
    assert daemon.returncode == 2
    assert "Missing option '--config'" in daemon.stderr


def test_status_tells_apart_an_owner_and_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_status(holders=(), counters=(("index_entries_damaged", 0), ("owned", 1)))
    monkeypatch.setattr(pool_module, "inspect_pool", lambda path: found)
    text = run("pool", "status", "/x").stdout
    assert "in use    yes, a process owns the pool" in text
    assert "owned" not in text
    as_json = json.loads(run("pool", "status", "/x", "--format", "json").stdout)
    assert as_json["owned"] is True
    assert as_json["counters"] == {"index_entries_damaged": 0}


def test_one_chunk_by_the_beginning_of_its_key(service: FakeChunkService, address: str) -> None:
    for first in (0xABCDEF, 0xABCDF0):
        chunk = dataclasses.replace(make_chunk(9), key=first.to_bytes(3, "big") + b"\x01" * 29)
        service.chunks[chunk.key] = chunk
    shown = run("chunk", "show", "ABCDEF", "--service", address)
    assert f"key       abcdef{'01' * 29}" in shown.stdout
    assert run("chunk", "show", "abcdef02", "--service", address).exit_code == 1
    several = run("chunk", "show", "000000", "--service", address)
    assert several.exit_code == 1
    assert f"several keys begin with 000000, among them {make_chunk(1).key.hex()}" in several.stderr
    short = run("chunk", "show", "abcde", "--service", address)
    assert short.exit_code == 2
    assert "6 to 64 hexadecimal digits" in short.stderr


def test_chunks_of_the_beginning_of_an_identity(
    service: FakeChunkService, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfusion.tools.mfctl.chunk_commands._PAGE_LIMIT", 4)
    for number in (3, 8, 9):
        other = make_chunk(number, identity=b"\x22" * 32)
        service.chunks[other.key] = other
    arguments = ("chunk", "list", "--service", address, "--identity", "22" * 6, "--format", "json")
    listed = json.loads(run(*arguments, "--limit", "1").output)
    assert [int(c["key"], 16) for c in listed["chunks"]] == [3]
    rest = json.loads(run(*arguments, "--after", listed["next_after_key"]).output)
    assert [int(c["key"], 16) for c in rest["chunks"]] == [8, 9]


def test_an_engine_configuration_is_told_from_the_service_one(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text('{"kv_connector": "MeshFusionConnector"}')
    result = run("config", "check", str(tmp_path / "kv.json"))
    assert result.exit_code == 1
    assert f"mfctl config check --connector {tmp_path}/kv.json" in result.stderr


def test_a_socket_of_another_user(address: str, service: FakeChunkService, monkeypatch: pytest.MonkeyPatch) -> None:
    service.failure = ServiceUnavailableError("cannot be reached", next_step="Start it.")
    monkeypatch.setattr("meshfusion.tools.mfctl.sources.os.access", lambda path, mode: False)
    result = run("pool", "status", "--service", address)
    assert result.exit_code == 5
    assert "does not let this user" in result.stderr
    assert "as the user of the service (uid" in result.stderr
    assert "Start it" not in result.stderr


def test_a_decimal_size_creates_a_pool(tmp_path: Path) -> None:
    result = run("pool", "create", str(tmp_path / "p"), "--size", "6MB", "--segment-size", "1MiB")
    assert result.exit_code == 0, result.stderr
    assert "4 segments of 1.0 MiB" in result.stdout
