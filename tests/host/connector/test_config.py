"""The connector's configuration: what is accepted, and that every slip is told, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshfusion.host.connector.config import OnUnsupported, parse_connector_config
from meshfusion.jbof.errors import ConfigError

POOL = {"pool": {"path": "/var/lib/meshfusion/pool"}}


def problems_of(config: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_connector_config(config)
    assert caught.value.next_step
    return [line.removeprefix("  - ") for line in caught.value.message.splitlines() if line.startswith("  - ")]


def test_defaults() -> None:
    config = parse_connector_config(POOL)
    assert config.pool is not None
    assert config.pool.path == Path("/var/lib/meshfusion/pool")
    assert (config.pool.size, config.pool.segment_size) == (4 << 30, 64 << 20)
    assert config.service is None
    assert config.on_unsupported is OnUnsupported.REFUSE
    assert config.lookup_deadline_ms == 20.0
    assert config.direct_io is True


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
    assert problem.startswith("save_queue: ")
    assert repr(bad) in problem


def test_an_absurd_size_is_no_crash() -> None:
    (problem,) = problems_of({**POOL, "chunk_min_bytes": "9" * 400 + "TiB"})
    assert problem.startswith("chunk_min_bytes: ")


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
    assert problem.startswith(f"{field}: ")
    assert repr(bad) in problem


@pytest.mark.parametrize("bad", ["", 5, "unix:relative/path", "http://box/", "box", "box:99999"])
def test_a_service_that_is_no_address(bad: object) -> None:
    (problem,) = problems_of({"service": bad})
    assert problem.startswith("service: ")


@pytest.mark.parametrize("bad", ["", 5, "a\0b", None])
def test_a_pool_path_that_is_none(bad: object) -> None:
    (problem,) = problems_of({"pool": {"path": bad}})
    assert problem.startswith("pool.path: ")


@pytest.mark.parametrize("bad", ["/var/lib/pool", 5, [], True])
def test_a_pool_that_is_no_mapping(bad: object) -> None:
    (problem,) = problems_of({"pool": bad})
    assert problem.startswith("pool: ")


def test_a_pool_without_path() -> None:
    (problem,) = problems_of({"pool": {}})
    assert problem.startswith("pool.path: Field required")


@pytest.mark.parametrize("both", [{}, {**POOL, "service": "unix:///run/s.sock"}, {"pool": None, "service": None}])
def test_exactly_one_of_pool_and_service(both: dict[str, Any]) -> None:
    (problem,) = problems_of(both)
    assert "exactly one of" in problem


@pytest.mark.parametrize(
    ("config", "name", "suggestion"),
    [
        ({**POOL, "save_que": 1}, "save_que", "'save_queue'"),
        ({**POOL, "direct": True}, "direct", "'direct_io'"),
        ({"pool": {"path": "/p", "segmentsize": 1}}, "pool.segmentsize", "'segment_size'"),
        ({"pool": {"path": "/p", "save_queue": 1}}, "pool.save_queue", "known keys: path, size, segment_size"),
        ({**POOL, "zzz": 1}, "zzz", "known keys: pool, service"),
    ],
)
def test_unknown_keys_are_named_with_a_suggestion(config: dict[str, Any], name: str, suggestion: str) -> None:
    (problem,) = problems_of(config)
    assert problem.startswith(f"{name}: unknown key")
    assert suggestion in problem


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
    named = [problem.split(":")[0] for problem in problems]
    assert sorted(named) == [
        "(top level)",
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
