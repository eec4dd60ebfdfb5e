"""Targets that tests kill and start again, in a guest, and what each shows of itself: read without the service's code,
so that both can be compared.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from meshfusion.dpu.export.spdk.client import SpdkClient
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.lab.guest_setup.nvmet import NVMET, remove_exports
from meshfusion.tools.lab.guest_setup.steps import load_modules
from tests.lab.conftest import NVMF_TGT_VARIABLE

START_S = 60.0
RPC_S = 5.0
T = TypeVar("T")
MEMORY_MIB = 512

Reach: TypeAlias = "tuple[tuple[tuple[int, str], ...], tuple[str, ...]]"
"""What a host may reach: (NSID, device) of each namespace, and the addresses where it may connect to."""


class KillableTarget(Protocol):
    def configuration(self, addresses: tuple[str, ...]) -> str:
        """YAML of the service's exports."""
        ...

    def start(self) -> None: ...

    def kill(self) -> None:
        """Everything that it was told is lost, and every connection."""
        ...

    def reach(self) -> Mapping[str, Reach]:
        """Of every host that is let in, by its NQN; empty while the target cannot be asked."""
        ...

    def connected(self) -> frozenset[str]:
        """NQNs of the hosts that may have queue pairs."""
        ...

    def log(self) -> str: ...


class KernelTarget:
    """``kill`` takes the whole tree of configfs down, as ``nvmetcli clear`` does; the kernel's code is always there."""

    def configuration(self, addresses: tuple[str, ...]) -> str:
        portals = ", ".join(f"'rdma://{address}:4420'" for address in addresses)
        return f"exports: {{target: nvmet, portals: [{portals}]}}\n"

    def start(self) -> None:
        load_modules("nvmet", "nvmet-rdma")

    def kill(self) -> None:
        """A service that runs makes things meanwhile: until nothing was in the way."""
        end_s = time.monotonic() + START_S
        while left := remove_exports():
            assert time.monotonic() < end_s, left
            time.sleep(0.01)

    def reach(self) -> Mapping[str, Reach]:
        try:
            found: dict[str, Reach] = {}
            for subsystem in (NVMET / "subsystems").iterdir():
                reach = _namespaces(subsystem), _addresses(subsystem.name)
                found |= {host.name: reach for host in (subsystem / "allowed_hosts").iterdir()}
            return found
        except OSError:  # it is being changed
            return {}

    def connected(self) -> frozenset[str]:
        """The kernel does not tell: whoever has a subsystem may be connected to it, and nobody else."""
        return frozenset(self.reach())

    def log(self) -> str:
        return ""


def _namespaces(subsystem: Path) -> tuple[tuple[int, str], ...]:
    enabled = [n for n in (subsystem / "namespaces").iterdir() if (n / "enable").read_text().strip() == "1"]
    return tuple(sorted((int(n.name), (n / "device_path").read_text().strip()) for n in enabled))


def _addresses(subsystem_nqn: str) -> tuple[str, ...]:
    ports = [port for port in (NVMET / "ports").iterdir() if (port / "subsystems" / subsystem_nqn).exists()]
    return tuple(sorted((port / "addr_traddr").read_text().strip() for port in ports))


class SpdkTarget:
    """A process of SPDK's ``nvmf_tgt``; ``kill`` is SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "spdk.sock"
        self._log = folder / "nvmf.log"
        self._process: subprocess.Popen[bytes] | None = None

    def configuration(self, addresses: tuple[str, ...]) -> str:
        portals = ", ".join(f"'rdma://{address}:4420'" for address in addresses)
        spdk = f"{{socket: {self._socket}, memory: {MEMORY_MIB}MiB, connections: 48}}"
        return f"exports: {{target: spdk, portals: [{portals}], spdk: {spdk}}}\n"

    def start(self) -> None:
        options = ["--no-huge", "-s", str(MEMORY_MIB), "-m", "0x1", "--no-pci", "--wait-for-rpc", "--iova-mode=va"]
        command = [os.environ[NVMF_TGT_VARIABLE], *options, "-r", str(self._socket)]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()  # whoever starts another one must know that this one is gone
            self._process = None

    def reach(self) -> Mapping[str, Reach]:
        return self._ask(_spdk_reach, {})

    def connected(self) -> frozenset[str]:
        """Of every subsystem, from its list of queue pairs."""
        return self._ask(_spdk_connected, frozenset())

    def log(self) -> str:
        return self._log.read_text()[-3000:]

    def _ask(self, question: Callable[[SpdkClient], T], unknown: T) -> T:
        rpc = SpdkClient(self._socket)
        try:
            rpc.connect(RPC_S)
            return question(rpc)
        except MeshFusionError:  # it is starting
            return unknown
        finally:
            rpc.close()


def _spdk_reach(rpc: SpdkClient) -> dict[str, Reach]:
    files = {
        bdev["name"]: bdev["driver_specific"]["aio"]["filename"]
        for bdev in rpc.call("bdev_get_bdevs", RPC_S)
        if "aio" in bdev.get("driver_specific", {})
    }
    found: dict[str, Reach] = {}
    for subsystem in _spdk_subsystems(rpc):
        namespaces = tuple(sorted((n["nsid"], files[n["name"]]) for n in subsystem["namespaces"]))
        addresses = tuple(sorted(a["traddr"] for a in subsystem["listen_addresses"]))
        found |= {host["nqn"]: (namespaces, addresses) for host in subsystem["hosts"]}
    return found


def _spdk_connected(rpc: SpdkClient) -> frozenset[str]:
    return frozenset(
        pair["hostnqn"]
        for subsystem in _spdk_subsystems(rpc)
        for pair in rpc.call("nvmf_subsystem_get_qpairs", RPC_S, nqn=subsystem["nqn"])
    )


def _spdk_subsystems(rpc: SpdkClient) -> list[dict[str, Any]]:
    return [found for found in rpc.call("nvmf_get_subsystems", RPC_S) if found["subtype"] == "NVMe"]


def killable(name: str, folder: Path) -> KillableTarget:
    """``nvmet`` or ``spdk``."""
    return KernelTarget() if name == "nvmet" else SpdkTarget(folder)
