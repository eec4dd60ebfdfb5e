"""soft-RoCE: one device on a dummy interface, or a pair of devices for each path between a host and a target.

The ends of a path are in one network namespace, because soft-RoCE of Linux 6.1 works in the first one only. Packets go
over the veth pair all the same when the initiator binds to its end's address (``nvme connect --host-traddr``, or a
source address for rdma_resolve_addr); else the kernel would take the short way inside the target's device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.guest_setup.shaping import Shaping, shaping_steps
from meshfusion.tools.lab.guest_setup.steps import Run, Step, Write, carry_out, load_modules, output_of, run, try_all

MTU_BYTES: Final = 9000
"""Of the interface: soft-RoCE then uses its largest path MTU, 4096."""

DUMMY: Final = "roce0"  # not dummy0, which the kernel makes by itself
DUMMY_ADDRESS: Final = "10.99.0.1"
MAX_PATHS: Final = 64
_CONF: Final = Path("/proc/sys/net/ipv4/conf")
_MODULES: Final = ("rdma_rxe", "rdma_ucm", "ib_uverbs", "ib_umad")


@dataclass(frozen=True, slots=True)
class RdmaLink:
    """A soft-RoCE device on a network interface."""

    device: str
    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class RdmaPath:
    """Two links that reach each other and nothing else."""

    host: RdmaLink
    target: RdmaLink


def soft_roce_on_dummy(mtu_bytes: int = MTU_BYTES) -> RdmaLink:
    """One device that talks to itself. Raises LabError."""
    load_modules("dummy", *_MODULES)
    carry_out(dummy_steps(mtu_bytes))
    return dummy_link()


def soft_roce_paths(count: int, mtu_bytes: int = MTU_BYTES, shaping: Shaping | None = None) -> tuple[RdmaPath, ...]:
    """``count`` paths, each with a subnet of its own, shaped in both directions. Raises LabError."""
    load_modules("veth", *_MODULES)
    paths = tuple(rdma_path(index) for index in range(count))
    for path in paths:
        carry_out(path_steps(path, mtu_bytes))
        if shaping is not None:
            shape_path(path, shaping)
    return paths


def shape_path(path: RdmaPath, shaping: Shaping) -> None:
    """Also a path in use. Raises LabError."""
    load_modules("sch_htb", "sch_netem")
    for link in (path.host, path.target):
        carry_out(shaping_steps(link.interface, shaping))


def cut_path(path: RdmaPath) -> None:
    """Nothing passes any more, and nobody is told: as when a switch in between goes away. Raises LabError.

    Setting an end down instead would also take routes and neighbours along, and after that soft-RoCE of Linux 6.1
    answers no connection request, the kernel's own initiator's neither, while associations from before are left.
    """
    shape_path(path, Shaping(loss_percent=100))


def restore_path(path: RdmaPath, shaping: Shaping | None = None) -> None:
    """Undoes :func:`cut_path`; ``shaping`` is what the path had before. Raises LabError."""
    shape_path(path, shaping or Shaping())


def remove_links() -> list[str]:
    """Every soft-RoCE device and every interface made here; returns what could not be removed."""
    return try_all(removal_steps(_names("rdma", "link"), _names("ip", "-o", "link")))


def dummy_link() -> RdmaLink:
    return RdmaLink("rxe0", DUMMY, DUMMY_ADDRESS)


def rdma_path(index: int) -> RdmaPath:
    """Host end 10.98.index.1 on ``mfhost<index>``, target end 10.98.index.2 on ``mftarget<index>``."""
    assert 0 <= index < MAX_PATHS, f"at most {MAX_PATHS} paths"
    subnet = f"10.98.{index}"
    return RdmaPath(
        RdmaLink(f"rxehost{index}", f"mfhost{index}", f"{subnet}.1"),
        RdmaLink(f"rxetarget{index}", f"mftarget{index}", f"{subnet}.2"),
    )


def dummy_steps(mtu_bytes: int) -> list[Step]:
    link = dummy_link()
    return [run(f"ip link add {link.interface} type dummy"), *_link_steps(link, mtu_bytes)]


def path_steps(path: RdmaPath, mtu_bytes: int) -> list[Step]:
    host, target = path.host, path.target
    steps: list[Step] = [run(f"ip link add {host.interface} type veth peer name {target.interface}")]
    for link in (host, target):
        # Both addresses are this machine's own: without this, packets from one to the other are dropped as forged.
        steps += [
            Write(_CONF / link.interface / "accept_local", "1"),
            Write(_CONF / link.interface / "rp_filter", "0"),
            Write(_CONF / link.interface / "arp_ignore", "1"),
            Write(_CONF / link.interface / "arp_announce", "2"),
        ]
    return [*steps, *_link_steps(host, mtu_bytes), *_link_steps(target, mtu_bytes)]


def _link_steps(link: RdmaLink, mtu_bytes: int) -> list[Run]:
    return [
        run(f"ip address add {link.address}/24 dev {link.interface}"),
        run(f"ip link set {link.interface} mtu {mtu_bytes} up"),
        run(f"rdma link add {link.device} type rxe netdev {link.interface}"),
    ]


def removal_steps(rdma_devices: Iterable[str], interfaces: Iterable[str]) -> list[Run]:
    """A veth pair goes with either of its ends."""
    ours = [name for name in interfaces if name == DUMMY or name.startswith("mfhost")]
    return [
        *(run(f"rdma link delete {device}") for device in rdma_devices if device.startswith("rxe")),
        *(run(f"ip link delete {interface}") for interface in ours),
    ]


def _names(*argv: str) -> list[str]:
    """The second word of each line, without what follows ":", "@" or "/" in it."""
    words = (line.split()[1] for line in output_of(*argv).splitlines() if line.strip())
    return [word.split("/")[0].split("@")[0].rstrip(":") for word in words]
