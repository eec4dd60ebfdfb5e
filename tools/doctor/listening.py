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

    @property
    def check(self) -> str:
        return f"socket {self.address.path}" if isinstance(self.address, UnixAddress) else f"port {self.address}"

    @property
    def who_listens(self) -> str:
        """A command that says."""
        if isinstance(self.address, UnixAddress):
            return f"ss -lxp src {self.address.path}"
        return f"ss -ltnp 'sport = :{self.address.port}'"


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
        is_open = _is_open(machine, door.address)
        if door.is_ours:
            yield _finding(door, is_open=is_open, is_served=is_served)
        else:
            cause = "somebody listens" if is_open else "nobody listens"
            yield Finding(door.check, State.INFO, f"{cause}; {door.key}, of the target")


def _finding(door: Door, *, is_open: bool, is_served: bool) -> Finding:
    if is_open and not is_served:
        cause = f"another process listens there, and the service does not run; {door.key}"
        return Finding(
            door.check, State.FAIL, cause, f"{door.who_listens} names the process; end it, or change {door.key}."
        )
    if is_served and not is_open:
        remedy = "The service may run with an older configuration: mfctl service reload, or restart it."
        return Finding(door.check, State.WARN, f"the service runs and does not listen there; {door.key}", remedy)
    return Finding(door.check, State.OK, f"{'the service listens' if is_served else 'free'}; {door.key}")


def _is_open(machine: Machine, address: TcpAddress | UnixAddress) -> bool:
    machine.need("proc/net", "who listens")
    if isinstance(address, UnixAddress):
        return any(line.split()[-1] == str(address.path) for line in machine.lines("proc/net/unix") if line.split())
    return address.port in _listening_ports(machine)


def _listening_ports(machine: Machine) -> frozenset[int]:
    rows = (line.split() for name in ("tcp", "tcp6") for line in machine.lines(f"proc/net/{name}")[1:])
    return frozenset(int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTEN)
