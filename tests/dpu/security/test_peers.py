"""Who is on this machine, and that nobody else opens the pool's files."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest

from meshfusion.dpu.api.security.guard import Caller, Guard
from meshfusion.dpu.api.security.peers import is_on_this_machine
from meshfusion.dpu.api.security.principal import LOCAL
from meshfusion.dpu.api.security.roles import RULES
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import UnsupportedError
from tests.jbof.loop_devices import privileged


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("unix:", True),
        ("unix:/run/s", True),
        ("ipv4:127.0.0.1:4711", True),
        ("ipv4:127.8.8.8:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4711", True),
        ("ipv4:192.0.2.1:4711", False),  # for documents only (RFC 5737), like the next one (RFC 3849)
        ("ipv6:%5B2001:db8::1%5D:4711", False),
        ("ipv6:%5B::ffff:192.0.2.1%5D:4711", False),
        ("ipv4:nonsense", False),
        ("", False),
    ],
)
def test_by_the_address(peer: str, is_here: bool) -> None:
    assert is_on_this_machine(peer) is is_here


def test_by_an_address_of_a_port_of_this_machine() -> None:
    """Which one connects to elsewhere from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("127.0.0.1", 9))
        assert is_on_this_machine(f"ipv4:{probe.getsockname()[0]}:9")


def test_a_machine_that_lets_any_address_be_bound_is_not_everywhere() -> None:
    """As machines do that take over each other's addresses (keepalived, HAProxy)."""
    privileged("unshare", "--net", "ip", "link", "add", "far", "type", "bridge")
    ask = "from meshfusion.dpu.api.security.peers import is_on_this_machine as here; print(*map(here, {!r}))"
    peers = ["ipv4:192.0.2.1:1", "ipv6:%5B2001:db8::1%5D:1", "ipv4:192.0.2.7:1", "ipv6:%5B2001:db8::7%5D:1"]
    there = (
        "ip link set lo up && ip link add far type bridge && ip addr add 192.0.2.7/24 dev far && "
        "ip addr add 2001:db8::7/64 dev far nodad && ip link set far up && "
        "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind && echo 1 > /proc/sys/net/ipv6/ip_nonlocal_bind && "
        'exec "$0" -c "$1"'
    )
    command = ["unshare", "--net", "sh", "-c", there, sys.executable, ask.format(peers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout.split()) == (0, ["False", "False", "True", "True"]), done.stderr


@pytest.mark.parametrize("access", ["", "local"])
def test_files_are_for_callers_of_this_machine(access: str) -> None:
    """A liveness lock proves nothing of a process elsewhere, though its host may see the same files (rule 3)."""
    rule, asked = RULES["ChunkService.Attach"], list[Any]()
    far, near = (Caller(LOCAL, peer, "ChunkService.Attach", rule) for peer in ("ipv4:192.0.2.1:1", "ipv4:127.0.0.1:1"))
    request = pb.AttachRequest(incarnation="i", tenant="default", access=access)
    with pytest.raises(UnsupportedError, match="is not on the service's machine") as caught:
        Guard().run(far, request, lambda: asked.append(1))
    assert "exports" in caught.value.next_step
    assert asked == []
    Guard().run(near, request, lambda: asked.append(1))
    request.access = "nvmeof"
    Guard().run(far, request, lambda: asked.append(1))
    assert asked == [1, 1]
