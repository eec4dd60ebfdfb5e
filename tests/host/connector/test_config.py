"""The connector's configuration: what is accepted, and that every slip is told, all at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshfusion.host.connector.config import OnUnsupported, parse_connector_config
from meshfusion.jbof.config_problems import ConfigProblemsError
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.key_scope import KeyScope

POOL = {"pool": {"path": "/var/lib/meshfusion/pool"}}


def problems_of(config: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_connector_config(config)
    assert caught.value.next_step
    assert isinstance(caught.value, ConfigProblemsError)
    problems = [str(problem) for problem in caught.value.problems]
    assert not any("nput should" in problem or "Field required" in problem for problem in problems), "not our words"
    return problems


def shown(field: str, value: object) -> str:
    return f"{field}: is null: " if value is None else f"{field} = {value!r}: "


def test_defaults() -> None:
    config = parse_connector_config(POOL)
    assert config.pool is not None
    assert config.pool.path == Path("/var/lib/meshfusion/pool")
    assert (config.pool.size, config.pool.segment_size, config.pool.policy) == (4 << 30, 64 << 20, "learned")
    assert config.service is None
    assert config.on_unsupported is OnUnsupported.REFUSE
    assert config.lookup_deadline_ms == 20.0
    assert config.direct_io is True


def test_a_pool_of_its_own_may_write_everything() -> None:
    config = parse_connector_config({"pool": {"path": "/p", "policy": "everything"}})
    assert config.pool is not None
    assert config.pool.policy == "everything"
    (problem,) = problems_of({"pool": {"path": "/p", "policy": "lru"}})
    assert problem == "pool.policy = 'lru': must be 'learned' or 'everything'; write for example learned"


def test_everything_set() -> None:
    config = parse_connector_config(
        {
            "service": "unix:///run/meshfusion.sock",
            "on_unsupported": "serve_without_cache",
            "weights_id": "mine",
            "force_load_failure_policy": True,
            "chunk_min_bytes": "2MiB",
            "lookup_deadline_ms": 5,
            "save_queue": "1.5GiB",
            "load_threads": 8,
            "direct_io": False,
            "load_always": True,
        }
    )
    assert config.service == "unix:///run/meshfusion.sock"
    assert config.on_unsupported is OnUnsupported.SERVE_WITHOUT_CACHE
    assert (config.chunk_min_bytes, config.save_queue) == (2 << 20, 3 << 29)
    assert config.lookup_deadline_ms == 5.0


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64MiB", 64 << 20),
        ("1 gib", 1 << 30),
        ("0.5GiB", 1 << 29),
        ("1GB", 10**9),
        (" 268435456 ", 1 << 28),
        (1 << 27, 1 << 27),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    config = parse_connector_config({**POOL, "save_queue": text})
    assert config.save_queue == size_bytes


@pytest.mark.parametrize("bad", ["4XB", "", "GiB", "-1MiB", "1e9", "64 MiB each", True, 1.5, None, [1], "0.3B", 1000])
def test_sizes_that_are_none(bad: object) -> None:
    (problem,) = problems_of({**POOL, "save_queue": bad})
    assert problem.startswith(shown("save_queue", bad))


def test_an_absurd_size_is_no_crash() -> None:
    (problem,) = problems_of({**POOL, "chunk_min_bytes": "9" * 400 + "TiB"})
    assert problem.startswith("chunk_min_bytes = '999")
    assert len(problem) < 300


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("lookup_deadline_ms", 0),
        ("lookup_deadline_ms", -1),
        ("lookup_deadline_ms", "20"),
        ("lookup_deadline_ms", float("nan")),
        ("load_threads", 0),
        ("load_threads", 65),
        ("load_threads", 2.5),
        ("load_threads", True),
        ("direct_io", "yes"),
        ("direct_io", 1),
        ("load_always", "false"),
        ("on_unsupported", "ignore"),
        ("weights_id", 5),
        ("chunk_min_bytes", 100),
        ("chunk_min_bytes", "2GiB"),
    ],
)
def test_wrong_types_and_impossible_values(field: str, bad: object) -> None:
    (problem,) = problems_of({**POOL, field: bad})
    assert problem.startswith(shown(field, bad))


@pytest.mark.parametrize(
    ("field", "bad", "problem"),
    [
        ("load_threads", "two", "load_threads = 'two': must be a whole number; write for example 4"),
        ("load_threads", 65, "load_threads = 65: must be at most 64; use at least 1 and at most 64, for example 4"),
        ("lookup_deadline_ms", "20", "lookup_deadline_ms = '20': must be a number; write for example 20.0"),
        ("direct_io", [True], "direct_io = [True]: must be true or false; write for example true"),
        ("weights_id", 5, "weights_id = 5: must be a text; correct it"),
        (
            *("weights_id", " "),
            "weights_id = ' ': is empty, and names nothing; write a name that you change whenever the weights change",
        ),
        (
            *("on_unsupported", "ignore"),
            "on_unsupported = 'ignore': must be 'refuse' or 'serve_without_cache'; write for example refuse",
        ),
        (
            *("chunk_min_bytes", "2GiB"),
            "chunk_min_bytes = '2GiB': must be at most 1GiB; use at least 4KiB and at most 1GiB, for example 1MiB",
        ),
        (
            *("save_queue", "-1GiB"),
            "save_queue = '-1GiB': is negative, a size is more than 0; "
            "write for example 4GiB, 512MiB or a number of bytes",
        ),
    ],
)
def test_problems_are_told_as_those_of_the_service(field: str, bad: object, problem: str) -> None:
    assert problems_of({**POOL, field: bad}) == [problem]


@pytest.mark.parametrize("bad", ["", 5, "unix:relative/path", "http://box/", "box", "box:99999"])
def test_a_service_that_is_no_address(bad: object) -> None:
    (problem,) = problems_of({"service": bad})
    assert problem.startswith(shown("service", bad))


@pytest.mark.parametrize("bad", ["", 5, "a\0b", None])
def test_a_pool_path_that_is_none(bad: object) -> None:
    (problem,) = problems_of({"pool": {"path": bad}})
    assert problem.startswith(shown("pool.path", bad))
    assert "must be the path of a directory; write for example /var/lib/meshfusion/pool" in problem


@pytest.mark.parametrize("bad", ["/var/lib/pool", 5, [], True])
def test_a_pool_that_is_no_mapping(bad: object) -> None:
    (problem,) = problems_of({"pool": bad})
    assert problem == f"pool = {bad!r}: must be a mapping of keys to values; correct it"


def test_a_pool_without_path() -> None:
    (problem,) = problems_of({"pool": {}})
    assert problem == "pool.path: is missing; add path: /var/lib/meshfusion/pool"


@pytest.mark.parametrize("both", [{}, {**POOL, "service": "unix:///run/s.sock"}, {"pool": None, "service": None}])
def test_exactly_one_of_pool_and_service(both: dict[str, Any]) -> None:
    (problem,) = problems_of(both)
    assert problem == (
        "kv_connector_extra_config: must name exactly one of pool and service; "
        "give either `pool: {path: /dir}` (embedded) or `service: unix:///path` (shared service)"
    )


def test_whose_engine_it_is() -> None:
    service = {"service": "unix:///run/s.sock"}
    assert parse_connector_config(service).tenant == "default"
    assert parse_connector_config({**service, "tenant": "red-7.x"}).tenant == "red-7.x"
    for bad in ("", "a b", "-a", "a/b", "x" * 49, 5, None):
        (problem,) = problems_of({**service, "tenant": bad})
        assert problem.startswith(shown("tenant", bad)), problem
        assert problem.endswith("write for example red")
    (problem,) = problems_of({**POOL, "tenant": "red"})
    assert problem.startswith("tenant = 'red': is for a service, and an embedded pool is this engine's own; remove it")


@pytest.mark.parametrize(
    ("config", "name", "suggestion"),
    [
        ({**POOL, "save_que": 1}, "save_que", "did you mean save_queue?"),
        ({**POOL, "direct": True}, "direct", "did you mean direct_io?"),
        ({"pool": {"path": "/p", "segmentsize": 1}}, "pool.segmentsize", "did you mean pool.segment_size?"),
        (
            {"pool": {"path": "/p", "save_queue": 1}},
            "pool.save_queue",
            "remove it; known here: path, size, segment_size, policy",
        ),
        ({"servce": "unix:///s"}, "servce", "did you mean service?"),
        ({"pool": {"paht": "/p"}}, "pool.paht", "did you mean pool.path?"),
        ({**POOL, "zzz": 1}, "zzz", "remove it; known here: pool, service"),
    ],
)
def test_unknown_keys_are_named_with_a_suggestion(config: dict[str, Any], name: str, suggestion: str) -> None:
    (problem,) = problems_of(config)
    assert problem.startswith(f"{name}: unknown key; {suggestion}")


def test_all_problems_at_once() -> None:
    problems = problems_of(
        {
            "pool": {"path": "", "size": "1KiB", "colour": "red"},
            "service": "unix:///run/s.sock",
            "lookup_deadline_ms": -1,
            "load_threads": "two",
            "save_que": 5,
        }
    )
    named = [re.split("[: ]", problem)[0] for problem in problems]
    assert sorted(named) == [
        "kv_connector_extra_config",
        "load_threads",
        "lookup_deadline_ms",
        "pool.colour",
        "pool.path",
        "pool.size",
        "save_que",
    ]


@pytest.mark.parametrize("bad", [None, "pool: /p", 5, [POOL]])
def test_not_a_mapping_at_all(bad: object) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_connector_config(bad)


def test_block_without_direct_io_is_told_along_with_everything_else() -> None:
    wrong = {"pool": {"path": "/tmp/x"}, "path": "block", "direct_io": False}
    (alone,) = problems_of(wrong)
    assert shown("path", "block") in alone
    assert "O_DIRECT, which direct_io = false switches off" in alone
    said = problems_of({**wrong, "load_threads": 0})
    assert len(said) == 2
    assert alone in said
    for right in ({**wrong, "path": "staged"}, {**wrong, "direct_io": True}):
        assert parse_connector_config(right).pool is not None


def test_keys_for_each_command_are_for_rdma() -> None:
    service = {"service": "unix:///run/meshfusion.sock"}
    assert parse_connector_config(service).key_scope is KeyScope.REGION
    assert parse_connector_config({**service, "path": "rdma", "key_scope": "command"}).key_scope is KeyScope.COMMAND
    for path in ({}, {"path": "block"}):
        (said,) = problems_of({**service, **path, "key_scope": "command"})
        assert "key_scope" in said
        assert "set path: rdma" in said
    both = problems_of({**service, "key_scope": "command", "load_threads": 0})
    assert len(both) == 2, "both at once"
    assert "key_scope" in both[1]
    for path in ({"path": "RDMA"}, {"pth": "rdma"}):
        (said,) = problems_of({**service, **path, "key_scope": "command"})
        assert "key_scope = " not in said, "what is meant is clear"
    (said,) = problems_of({**service, "path": "rdma", "key_scope": "window"})
    assert "region" in said
    assert "command" in said


def test_rdma_without_a_service_is_told_along_with_everything_else() -> None:
    said = problems_of({"pool": {"path": "/tmp/x"}, "path": "rdma", "load_threads": 0})
    assert len(said) == 2
    assert [text for text in said if shown("path", "rdma") in text and "needs a service" in text], said
    (alone,) = problems_of({"pool": {"path": "/tmp/x"}, "path": "rdma"})
    assert "needs a service" in alone


REMOTE = {"service": "10.0.0.1:7700"}
TLS = {"ca": "/tls/ca.pem", "certificate": "/tls/e.pem", "key": "/tls/e.key"}


def test_a_service_on_another_machine() -> None:
    config = parse_connector_config({**REMOTE, "service_tls": TLS, "service_token_file": "/tls/token"})
    security = config.security
    assert (security.ca, security.certificate, security.key) == (
        Path("/tls/ca.pem"), Path("/tls/e.pem"), Path("/tls/e.key"),
    )  # fmt: skip
    assert (security.token_file, security.server_name) == (Path("/tls/token"), None)
    parse_connector_config({**REMOTE, "service_tls": {"ca": "/tls/ca.pem", "server_name": "pool"}})
    for near in ("127.0.0.1:7700", "unix:///run/s", "localhost:1"):
        parse_connector_config({"service": near, "service_token_file": "/tls/token"})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (REMOTE, "service_tls: is missing: 10.0.0.1:7700 is not on this machine"),
        ({**REMOTE, "service_token_file": "/t"}, "service_tls: is missing: 10.0.0.1:7700 is not on this machine"),
        (
            {**REMOTE, "service_tls": {"ca": "/a", "key": "/k"}},
            "service_tls.certificate: is missing: a certifi",
        ),
        ({**REMOTE, "service_tls": {"certificate": "/a", "key": "/k"}}, "service_tls.ca: is missing; add ca:"),
        ({**REMOTE, "service_tls": {**TLS, "ca": "ca.pem"}}, "service_tls.ca = 'ca.pem': must be the absolute path"),
        ({**REMOTE, "service_tls": {**TLS, "cert": "/c"}}, "service_tls.cert: unknown key; "),
        ({"service": "unix:///s", "service_tls": TLS}, "service_tls: is for TLS, which unix sockets have no need of"),
        ({**POOL, "service_tls": TLS}, "service_tls: is for a service, and this is an embedded pool"),
        ({**POOL, "service_token_file": "/t"}, "service_token_file = '/t': is for a service, and this is an embedded"),
    ],
)
def test_what_a_service_on_another_machine_takes(config: dict[str, Any], expected: str) -> None:
    (problem,) = problems_of(config)
    assert problem.startswith(expected)


def test_a_service_elsewhere_without_tls_is_told_along_with_other_problems() -> None:
    first, second = sorted(problems_of({**REMOTE, "load_threads": 0}))
    assert first.startswith("load_threads = 0: ")
    assert second.startswith("service_tls: is missing: 10.0.0.1:7700 is not on this machine")
    (misspelt,) = problems_of({**REMOTE, "service_tsl": TLS})
    assert "did you mean service_tls?" in misspelt
