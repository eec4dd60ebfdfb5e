"""Whatever a configuration holds, it is read, or refused with a ConfigError; never does anything else come out.

``MESHFUSION_FUZZ_EXAMPLES`` sets how many are tried; the nightly test takes many more.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshfusion.dpu.access.tokens_file import read_tokens
from meshfusion.dpu.config import examine_service_config, load_service_config, read_config_file
from meshfusion.dpu.config_access import expiry_notes
from meshfusion.host.connector.config import parse_connector_config
from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.connector_config import check_connector_config
from tests.dpu.security.authority import Authority, replace
from tests.dpu.security.test_certificates import GOOD as TOKEN_ENTRY

EXAMPLES = int(os.environ.get("MESHFUSION_FUZZ_EXAMPLES", "150"))
NIGHTLY_EXAMPLES = 10 * EXAMPLES

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, math.nan, math.inf, -math.inf, 1e308, 5e-324]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "/", "..", "~", "a\0b", "/a\0b", "x" * 10_000, "/" + "x" * 300, "/" + "y/" * 3000, "🜁"]),
    st.sampled_from(["4GiB", "1e9GiB", "-1MiB", "९GiB", "unix:", "unix:///", "[::1]:1", "[", ":", "rdma://1.1.1.1:99999"]),
    st.dates(datetime.date(1, 1, 1)),
    st.binary(max_size=8),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=8), st.integers(-2, 2), st.none(), st.booleans(), st.sampled_from(["path", "size"]))
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def quick(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def good(folder: Path) -> dict[str, Any]:
    """With every part that there is, and nothing wrong."""
    ca = Authority(folder)
    server = ca.issue("server")
    replace(folder / "tokens", yaml.safe_dump([TOKEN_ENTRY]).encode(), mode=0o600)
    spdk = {
        "socket": "/run/spdk.sock",
        "memory": "8GiB",
        "cores": 1,
        "connections": 64,
        "bdev": "n0",
        "bdevs": {1: "n1"},
    }
    return {
        "listen": "10.0.0.1:7700",
        "pool": {"path": f"{folder}/pool", "create": True, "size": "64MiB", "segment_size": "1MiB"},
        "tls": {"certificate": str(server.certificate), "key": str(server.key), "client_ca": str(ca.path)},
        "access": [{"subject": "engine-1", "role": "engine", "tenant": "default"}],
        "tokens_file": f"{folder}/tokens",
        "audit": {"path": f"{folder}/audit.log"},
        "exports": {"target": "spdk", "portals": ["rdma://10.0.0.1:4420"], "authenticate": True, "spdk": spdk},
        "medium": {"policy": "learned", "drive_writes_per_day": 1.0, "free_fraction": 0.05},
        "leases": {"lease_ttl_s": 30.0, "grant_ttl_s": 60.0, "heartbeat_s": 5.0, "holder_silence_s": 15.0},
        "drives": {"check_interval_s": 5.0, "probation_s": 30.0, "drain_s": 600.0},
        "log": {"level": "info", "format": "text"},
    }


CONNECTOR = {
    "service": "10.0.0.1:7700",
    "service_tls": {"ca": "/none/ca", "certificate": "/none/c", "key": "/none/k", "server_name": "n"},
    "service_token_file": "/none/token",
    "path": "auto",
    "chunk_min_bytes": "1MiB",
    "lookup_deadline_ms": 20.0,
    "audit": {"share": 0.1, "alarms_max": 3},
}


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in ``data``, the root first."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def changed(data: Any, at: tuple[Any, ...], change: Any, how: str) -> Any:
    """A copy with what is at ``at`` replaced, taken away, or with a stranger beside it."""
    if not at:
        return change
    key, copy = at[0], dict(data) if isinstance(data, dict) else list(data)
    if len(at) > 1:
        copy[key] = changed(data[key], at[1:], change, how)
    elif how == "remove":
        del copy[key]
    elif how == "add" and isinstance(copy, dict):
        copy[f"{key}x"] = change
    else:
        copy[key] = change
    return copy


@st.composite
def mutations(draw: st.DrawFn, data: dict[str, Any]) -> Any:
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(places(data)[1:] or [()]))
        data = changed(data, at, draw(VALUES), draw(st.sampled_from(["replace", "remove", "add"])))
        if not isinstance(data, dict):
            break
    return data


def refusal(call: Callable[[], object]) -> ConfigError | None:
    """None: it is right. What else it raises than a ConfigError gets out."""
    try:
        call()
    except ConfigError as error:
        return error
    return None


def is_right(*calls: Callable[[], object]) -> bool:
    found = [error for error in map(refusal, calls) if error is not None]
    assert all(error.message and error.next_step for error in found)
    return not found


def check(path: Path) -> bool:
    """Is it a configuration?"""
    return is_right(
        lambda: expiry_notes(load_service_config(path).tls),
        lambda: examine_service_config(path, read_config_file(path))[0],
    )


def fuzz(folder: Path, examples: int) -> None:
    path, whole = folder / "service.yaml", good(folder)
    path.write_text(yaml.safe_dump(whole))
    load_service_config(path)
    outcomes = set()

    @quick(examples)
    @given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass"))))
    def nonsense(data: bytes) -> None:
        path.write_bytes(data)
        assert not check(path)

    @quick(examples)
    @given(VALUES)
    def documents(data: Any) -> None:
        path.write_text(yaml.safe_dump(data), errors="surrogatepass")
        check(path)

    @quick(2 * examples)
    @given(mutations(whole))
    def mutants(data: Any) -> None:
        path.write_text(yaml.safe_dump(data), errors="surrogatepass")
        outcomes.add(check(path))

    @quick(examples)
    @given(st.data())
    def damaged(data: st.DataObject) -> None:
        text = bytearray(yaml.safe_dump(whole).encode())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(text) - 1))
            text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        path.write_bytes(bytes(text))
        outcomes.add(check(path))

    for test in (nonsense, documents, mutants, damaged):
        test()
    assert False in outcomes


def fuzz_the_others(folder: Path, examples: int) -> None:
    """The connector's keys, and the file of tokens."""

    @quick(examples)
    @given(st.one_of(VALUES, mutations(CONNECTOR)))
    def connectors(data: Any) -> None:
        path = folder / "connector.yaml"
        path.write_text(yaml.safe_dump(data), errors="surrogatepass")
        is_right(lambda: parse_connector_config(data), lambda: check_connector_config(read_config_file(path), "f"))

    @quick(examples)
    @given(st.one_of(VALUES, mutations({"one": TOKEN_ENTRY})))
    def tokens(data: Any) -> None:
        path = folder / "some-tokens"
        entries = list(data.values()) if isinstance(data, dict) else data
        replace(path, yaml.safe_dump(entries).encode("utf-8", "surrogatepass"), mode=0o600)
        is_right(lambda: read_tokens(path))

    connectors()
    tokens()


def test_the_services_configuration_survives_nonsense(tmp_path: Path) -> None:
    fuzz(tmp_path, EXAMPLES)


def test_the_others_survive_nonsense(tmp_path: Path) -> None:
    fuzz_the_others(tmp_path, EXAMPLES)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_they_survive_much_nonsense(tmp_path: Path) -> None:
    fuzz(tmp_path, NIGHTLY_EXAMPLES)
    fuzz_the_others(tmp_path, NIGHTLY_EXAMPLES)
