"""Where the service and its target listen: is each port free for them, or theirs?

``/proc/net/tcp`` is described in the kernel's Documentation/networking/proc_net_tcp.rst: addresses and ports in
hexadecimal, state 0A is LISTEN. RDMA has its own ports, which are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshfusion.dpu.api.address import TcpAddress, UnixAddress, parse_address
from meshfusion.tools.doctor.machine import Machine
from meshfusion.tools.mfctl.findings import Finding, State

if TYPE_CHECKING:
    from meshfusion.dpu.config import ServiceConfig

_LISTEN: Final = "0A"


@dataclass(frozen=True, slots=True)
class Door:
    """``key``: of the configuration. ``is_ours``: the service itself listens there, not its target."""

    key: str
    address: TcpAddress | UnixAddress
    is_ours: bool = True


def doors_of(config: ServiceConfig) -> tuple[Door, ...]:
    """What can be seen of them: not the portals of RDMA."""
    doors = [Door("listen", address) for address in config.addresses]
    if config.telemetry.listen is not None:
        doors.append(Door("telemetry.listen", parse_address(config.telemetry.listen)))
    for portal in [] if config.exports is None else config.exports.portals:
        transport, _, rest = portal.partition("://")
        if transport == "tcp":
            doors.append(Door("exports.portals", parse_address(rest if _has_port(rest) else f"{rest}:4420"), False))
    return tuple(doors)


def _has_port(rest: str) -> bool:
    return ":" in rest.rpartition("]")[2]


def check_doors(machine: Machine, doors: tuple[Door, ...], *, is_served: bool) -> Iterator[Finding]:
    """``is_served``: the service of the configuration runs."""
    for door in doors:
        check = f"port {door.address}" if isinstance(door.address, TcpAddress) else f"socket {door.address.path}"
        is_open = _is_open(machine, door.address)
        if not door.is_ours:
            cause = "somebody listens" if is_open else "nobody listens"
            yield Finding(check, State.INFO, f"{cause}; {door.key}, of the target")
        elif is_open and is_served:
            yield Finding(check, State.OK, f"the service listens; {door.key}")
        elif is_open and isinstance(door.address, TcpAddress):
            remedy = f"ss -ltnp 'sport = :{door.address.port}' names the process; end it, or change {door.key}."
            yield Finding(
                check, State.FAIL, f"another process listens there, and the service does not run; {door.key}", remedy
            )
        elif is_open:
            yield Finding(check, State.WARN, f"a process has this socket, and the service does not run; {door.key}",
                          f"ss -lxp src {door.address.path} names it.")  # fmt: skip
        elif is_served:
            remedy = "The service may run with an older configuration: mfctl service reload, or restart it."
            yield Finding(check, State.WARN, f"the service runs and does not listen there; {door.key}", remedy)
        else:
            yield Finding(check, State.OK, f"free; {door.key}")


def _is_open(machine: Machine, address: TcpAddress | UnixAddress) -> bool:
    machine.need("proc/net", "who listens")
    if isinstance(address, UnixAddress):
        return any(line.split()[-1] == str(address.path) for line in machine.lines("proc/net/unix") if line.split())
    return address.port in _listening_ports(machine)


def _listening_ports(machine: Machine) -> frozenset[int]:
    rows = (line.split() for name in ("tcp", "tcp6") for line in machine.lines(f"proc/net/{name}")[1:])
    return frozenset(int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTEN)
