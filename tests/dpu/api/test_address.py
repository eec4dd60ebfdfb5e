from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.dpu.api.address import TcpAddress, UnixAddress, is_same_place, parse_address
from meshfusion.jbof.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected", "target"),
    [
        ("unix:///run/m.sock", UnixAddress(Path("/run/m.sock")), "unix:/run/m.sock"),
        ("127.0.0.1:7070", TcpAddress("127.0.0.1", 7070), "127.0.0.1:7070"),
        ("localhost:0", TcpAddress("localhost", 0), "localhost:0"),
        ("[::1]:80", TcpAddress("::1", 80), "[::1]:80"),
    ],
)
def test_addresses(text: str, expected: object, target: str) -> None:
    address = parse_address(text)
    assert address == expected
    assert address.grpc_target == target
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7070",
        "host",
        "host:",
        ":80",
        "host:http",
        "host:-1",
        "host:70000",
        "http://host:80",
        "host:²",
        "unix:relative.sock",
        "unix://relative/x.sock",
        "unix:///dir/",
        "unix:///" + "x" * 107,
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("::", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert TcpAddress(host, 1).is_loopback is loopback


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("127.0.0.1:7", "127.0.0.1:7", True),
        ("127.0.0.1:7", "127.0.0.1:8", False),
        ("127.0.0.1:7", "10.0.0.1:7", False),
        ("0.0.0.0:7", "10.0.0.1:7", True),
        ("0.0.0.0:7", "localhost:7", True),
        ("0.0.0.0:7", "[::1]:7", True),
        ("[::]:7", "10.0.0.1:7", True),
        ("[::]:7", "0.0.0.0:7", True),
        ("localhost:7", "127.0.0.1:7", True),
        ("localhost:7", "10.0.0.1:7", False),
        ("localhost:0", "localhost:0", False),
        ("unix:///s", "unix:///s", True),
        ("unix:///s", "unix:///t", False),
        ("unix:///s", "127.0.0.1:7", False),
    ],
)
def test_where_only_one_can_listen(one: str, other: str, expected: bool) -> None:
    assert is_same_place(parse_address(one), parse_address(other)) is expected
    assert is_same_place(parse_address(other), parse_address(one)) is expected
