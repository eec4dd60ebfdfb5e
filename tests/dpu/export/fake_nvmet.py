"""nvmet's configfs tree in memory, with what the kernel refuses (Linux 6.1.192, drivers/nvme/target/configfs.c).

Not a folder on a disk: what matters is that writes have effects, are refused in the wrong order, and may block.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from meshfusion.dpu.export.nvmet.configfs import refused

ANA_STATES = ("optimized", "non-optimized", "inaccessible", "persistent-loss", "change")


@dataclass
class FakeSubsystem:
    attributes: dict[str, str] = field(default_factory=lambda: {"attr_serial": "0123", "attr_allow_any_host": "0"})
    namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)


@dataclass
class FakePort:
    attributes: dict[str, str]
    subsystems: set[str] = field(default_factory=set)
    ana_state: str = "optimized"


class FakeKernel:
    """``devices``: paths that exist. ``hold``: (NQN, NSID) of namespaces with requests in flight; disabling one waits
    for its event with the configuration lock held. ``fault``: called with each change, raises OSError to refuse it.
    ``look``: called before something is read.
    """

    def __init__(self, devices: set[str]) -> None:
        self.devices = devices
        self.hold: dict[tuple[str, str], threading.Event] = {}
        self.fault: Callable[[str], None] = lambda _change: None
        self.watch: Callable[[], None] = lambda: None
        self.look: Callable[[str], None] = lambda _path: None
        self._config = threading.Lock()
        self.reboot()

    def reboot(self) -> None:
        self.subsystems: dict[str, FakeSubsystem] = {}
        self.hosts: dict[str, str] = {}
        self.hidden: set[str] = set()  # hosts whose key is not for every user of the machine
        self.ports: dict[str, FakePort] = {}
        self.connected: set[tuple[str, str]] = set()

    def connect_host(self, nqn: str, host: str) -> None:
        """It stays connected when it is no longer allowed, as long as the subsystem is at a port."""
        assert host in self.subsystems[nqn].hosts
        assert any(nqn in port.subsystems for port in self.ports.values())
        self.connected.add((nqn, host))

    def reachable(self) -> set[tuple[str, str]]:
        """(host, device) of all that could be read or written now."""
        allowed = {(nqn, host) for nqn, subsystem in self.subsystems.items() for host in subsystem.hosts}
        return {
            (host, namespace["device_path"])
            for nqn, host in allowed | self.connected
            for namespace in self.subsystems[nqn].namespaces.values()
            if namespace["enable"] == "1"
        }

    # -- ConfigFs -----------------------------------------------------------------------------------------------------

    def entries(self, folder: str) -> frozenset[str]:
        self.look(folder)
        try:
            return self._entries(folder)
        except KeyError:
            return frozenset()

    def _entries(self, folder: str) -> frozenset[str]:
        match folder.split("/"):
            case ["subsystems"]:
                return frozenset(self.subsystems)
            case ["ports"]:
                return frozenset(self.ports)
            case ["hosts", nqn]:
                return frozenset({"dhchap_key", "dhchap_ctrl_key", "dhchap_hash"} if nqn in self.hosts else ())
            case ["subsystems", nqn, "allowed_hosts"]:
                return frozenset(self.subsystems[nqn].hosts)
            case ["subsystems", nqn, "namespaces"]:
                return frozenset(self.subsystems[nqn].namespaces)
            case ["ports", port, "subsystems"]:
                return frozenset(self.ports[port].subsystems)
        raise AssertionError(folder)

    def read(self, path: str) -> str:
        self.look(path)
        try:
            return self._read(path)
        except KeyError as error:
            raise refused("read", path, os_error(errno.ENOENT)) from error

    def _read(self, path: str) -> str:
        match path.split("/"):
            case ["subsystems", nqn, attribute]:
                return self.subsystems[nqn].attributes[attribute]
            case ["subsystems", nqn, "namespaces", nsid, attribute]:
                return self.subsystems[nqn].namespaces[nsid][attribute]
            case ["ports", port, "ana_groups", "1", "ana_state"]:
                return self.ports[port].ana_state
            case ["ports", port, attribute]:
                return self.ports[port].attributes[attribute]
            case ["hosts", nqn, "dhchap_key"]:
                return self.hosts[nqn]
        raise AssertionError(path)

    def write(self, path: str, text: str) -> None:
        self._change("write", path, lambda: self._write(path.split("/"), text))

    def hide(self, path: str) -> None:
        self._change("hide", path, lambda: self._hide(path.split("/")))

    def make(self, folder: str) -> None:
        self._change("make", folder, lambda: self._make(folder.split("/")))

    def remove(self, folder: str) -> None:
        self._change("remove", folder, lambda: self._remove(folder.split("/")))

    def link(self, path: str, to: str) -> None:
        self._change("link", path, lambda: self._link(path.split("/"), to.split("/")))

    def unlink(self, path: str) -> None:
        self._change("unlink", path, lambda: self._unlink(path.split("/")))

    def _change(self, what: str, path: str, change: Callable[[], None]) -> None:
        try:
            self.fault(f"{what} {path}")
            change()
        except OSError as error:
            raise refused(what, path, error) from error
        except KeyError as error:
            raise refused(what, path, os_error(errno.ENOENT)) from error
        finally:
            self.watch()

    # -- what the kernel does -----------------------------------------------------------------------------------------

    def _write(self, path: list[str], text: str) -> None:
        match path:
            case ["subsystems", nqn, "attr_allow_any_host"]:
                with self._config:
                    require(text == "0" or not self.subsystems[nqn].hosts, errno.EINVAL)
                    self.subsystems[nqn].attributes["attr_allow_any_host"] = text
            case ["subsystems", nqn, "attr_serial"]:
                with self._config:
                    require(0 < len(text) <= 20, errno.EINVAL)
                    self.subsystems[nqn].attributes["attr_serial"] = text.ljust(20)
            case ["subsystems", nqn, "namespaces", nsid, "enable"]:
                with self._config:
                    self._enable(nqn, nsid, text)
            case ["subsystems", nqn, "namespaces", nsid, attribute]:
                namespace = self.subsystems[nqn].namespaces[nsid]
                require(attribute == "ana_grpid" or namespace["enable"] == "0", errno.EBUSY)
                require(attribute in namespace, errno.ENOENT)
                namespace[attribute] = str(uuid.UUID(text)) if attribute.startswith("device_n") else text
            case ["ports", port, "ana_groups", "1", "ana_state"]:
                require(text in ANA_STATES, errno.EINVAL)
                self.ports[port].ana_state = text
            case ["ports", port, attribute]:
                require(not self.ports[port].subsystems, errno.EACCES)
                require(attribute in self.ports[port].attributes, errno.ENOENT)
                self.ports[port].attributes[attribute] = text
            case ["hosts", nqn, "dhchap_key"]:
                require(text.startswith("DHHC-1:"), errno.EINVAL)
                require(nqn in self.hosts, errno.ENOENT)
                assert nqn in self.hidden, "every user of the machine could read it"
                self.hosts[nqn] = text
            case _:
                raise AssertionError(path)

    def _hide(self, path: list[str]) -> None:
        match path:
            case ["hosts", nqn, "dhchap_key"]:
                require(nqn in self.hosts, errno.ENOENT)
                self.hidden.add(nqn)
            case _:
                raise AssertionError(path)

    def _enable(self, nqn: str, nsid: str, text: str) -> None:
        namespace = self.subsystems[nqn].namespaces[nsid]
        if text == "1":
            require(namespace["device_path"] in self.devices, errno.ENOENT)
            namespace["enable"] = "1"
        elif namespace["enable"] == "1":
            namespace["enable"] = "0"  # reads so while it still waits
            self.hold.get((nqn, nsid), _set()).wait()

    def _make(self, path: list[str]) -> None:
        match path:
            case ["subsystems", nqn]:
                require(nqn not in self.subsystems, errno.EEXIST)
                self.subsystems[nqn] = FakeSubsystem()
            case ["subsystems", nqn, "namespaces", nsid]:
                require(nsid not in self.subsystems[nqn].namespaces, errno.EEXIST)
                names = {"device_path": "(null)", "device_uuid": str(uuid.uuid4()), "ana_grpid": "1", "enable": "0"}
                self.subsystems[nqn].namespaces[nsid] = {**names, "device_nguid": str(uuid.UUID(int=0))}
            case ["hosts", nqn]:
                require(nqn not in self.hosts, errno.EEXIST)
                self.hosts[nqn] = ""
            case ["ports", port]:
                require(port not in self.ports, errno.EEXIST)
                self.ports[port] = FakePort(
                    dict.fromkeys((f"addr_{n}" for n in ("adrfam", "trtype", "traddr", "trsvcid")), "")
                )
            case _:
                raise AssertionError(path)

    def _remove(self, path: list[str]) -> None:
        match path:
            case ["subsystems", nqn]:
                require(not any(nqn in port.subsystems for port in self.ports.values()), errno.EBUSY)
                require(not self.subsystems[nqn].namespaces, errno.ENOTEMPTY)
                require(not self.subsystems[nqn].hosts, errno.ENOTEMPTY)
                del self.subsystems[nqn]
                self.connected = {(there, host) for there, host in self.connected if there != nqn}
            case ["subsystems", nqn, "namespaces", nsid]:
                self._enable(nqn, nsid, "0")
                del self.subsystems[nqn].namespaces[nsid]
            case ["hosts", nqn]:
                require(not any(nqn in subsystem.hosts for subsystem in self.subsystems.values()), errno.EBUSY)
                del self.hosts[nqn]
                self.hidden.discard(nqn)
            case ["ports", port]:
                require(not self.ports[port].subsystems, errno.ENOTEMPTY)
                del self.ports[port]
            case _:
                raise AssertionError(path)

    def _link(self, path: list[str], to: list[str]) -> None:
        with self._config:
            match path, to:
                case ["subsystems", nqn, "allowed_hosts", host], ["hosts", target]:
                    require(host == target and host in self.hosts, errno.ENOENT)
                    require(self.subsystems[nqn].attributes["attr_allow_any_host"] == "0", errno.EINVAL)
                    require(host not in self.subsystems[nqn].hosts, errno.EEXIST)
                    self.subsystems[nqn].hosts.add(host)
                case ["ports", port, "subsystems", nqn], ["subsystems", target]:
                    require(nqn == target and nqn in self.subsystems, errno.ENOENT)
                    require("" not in self.ports[port].attributes.values(), errno.EINVAL)
                    # The first link makes it listen (nvmet_port_subsys_allow_link).
                    listening = [other.attributes for name, other in self.ports.items() if other.subsystems]
                    is_first = not self.ports[port].subsystems
                    require(not is_first or self.ports[port].attributes not in listening, errno.EADDRINUSE)
                    self.ports[port].subsystems.add(nqn)
                case _:
                    raise AssertionError(path)

    def _unlink(self, path: list[str]) -> None:
        with self._config:
            match path:
                case ["subsystems", nqn, "allowed_hosts", host]:
                    self.subsystems[nqn].hosts.remove(host)
                case ["ports", port, "subsystems", nqn]:
                    self.ports[port].subsystems.remove(nqn)
                    if not any(nqn in other.subsystems for other in self.ports.values()):
                        self.connected = {(there, host) for there, host in self.connected if there != nqn}
                case _:
                    raise AssertionError(path)


def require(condition: bool, code: int) -> None:
    if not condition:
        raise os_error(code)


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
