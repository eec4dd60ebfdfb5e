"""A stateful stand-in for nvmf_tgt: the RPCs that dpu/export/spdk uses, with SPDK's answers.

``test_recordings`` holds it to the answers of a real nvmf_tgt; the same suite runs against both (``test_spdk_target``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshfusion.dpu.export.spdk.calls import REQUIRED_METHODS
from tests.dpu.export.fake_subsystem import INTERNAL, INVALID, FakeSubsystem, Fault, Pair

DISCOVERY = {
    "nqn": "nqn.2014-08.org.nvmexpress.discovery",
    "subtype": "Discovery",
    "listen_addresses": [],
    "allow_any_host": True,
    "hosts": [],
}
STARTUP = frozenset({"iobuf_set_options", "framework_start_init"})
ALWAYS = frozenset({"spdk_get_version", "rpc_get_methods", "framework_wait_init"})
RUNTIME = (
    REQUIRED_METHODS
    | {"bdev_malloc_create", "bdev_delay_create", "bdev_get_bdevs", "bdev_set_qos_limit", "keyring_get_keys"}
    | {"bdev_aio_create", "bdev_aio_delete"}
) - ALWAYS
ONLY_BEFORE = (
    "Method may only be called before framework is initialized. Use --wait-for-rpc command line parameter and then "
    "issue this RPC before the framework_start_init RPC."
)
ONLY_AFTER = "Method may only be called after framework is initialized using framework_start_init RPC."


class FakeSpdk:
    """One process, from ``--wait-for-rpc`` on.

    ``stuck_hosts``: those whose requests in flight never end. ``racing_hosts``: those whose Connect is under way when
    they are removed; its queue pairs appear after that.
    """

    def __init__(self) -> None:
        self.version = {"version": "SPDK v26.09-pre git sha1 3230130e6a", "fields": {"major": 26, "minor": 9}}
        self.methods: list[str] = []
        self.started = False
        self.bdevs: list[str] = []
        self.aio: dict[str, dict[str, Any]] = {}
        self.rate_limits: dict[str, dict[str, int]] = {}
        self.transports: dict[str, dict[str, Any]] = {}
        self.subsystems: dict[str, FakeSubsystem] = {}
        self.keys: dict[str, str] = {}
        self.stuck_hosts: set[str] = set()
        self.racing_hosts: set[str] = set()
        self.iobuf_options: dict[str, Any] = {}

    def reachable(self) -> set[tuple[str, str]]:
        """(host, bdev) for all that could be read or written now, by a new connection or by one that lives."""
        return {
            (host, namespace["bdev_name"])
            for subsystem in self.subsystems.values()
            for host in {*subsystem.hosts, *(pair.host_nqn for pair in subsystem.pairs if pair.state == "enabled")}
            for namespace in subsystem.namespaces.values()
        }

    def lets_in(self, nqn: str, host_nqn: str, key: Path | None, psk: Path | None = None) -> bool:
        """``key``, ``psk``: the files of those that the host has. What SPDK wants stands in the file when it is asked,
        of TLS when the host was added."""
        subsystem = self.subsystems[nqn]
        known = subsystem.psks.get(host_nqn)
        is_secure = bool(subsystem.secure)
        if is_secure != (psk is not None):
            return False
        if psk is not None and (known is None or Path(self.keys[known]).read_text() != psk.read_text()):
            return False
        if not subsystem.listeners or not (subsystem.allow_any_host or host_nqn in subsystem.hosts):
            return False
        wanted = subsystem.hosts.get(host_nqn)
        return wanted is None or (key is not None and Path(self.keys[wanted]).read_text() == key.read_text())

    def connect_host(self, nqn: str, host_nqn: str, key: Path | None = None, psk: Path | None = None) -> None:
        """As an initiator would; asserts that it is let in."""
        assert self.lets_in(nqn, host_nqn, key, psk)
        subsystem = self.subsystems[nqn]
        controller = 1 + max((pair.controller for pair in subsystem.pairs), default=0)
        subsystem.pairs += [Pair(host_nqn, 0, controller=controller), Pair(host_nqn, 1, controller=controller)]

    def finish(self, host_nqn: str) -> None:
        """The host's requests in flight end."""
        self.stuck_hosts.discard(host_nqn)
        for subsystem in self.subsystems.values():
            subsystem.pairs = [
                pair for pair in subsystem.pairs if (pair.host_nqn, pair.state) != (host_nqn, "deactivating")
            ]

    def call(self, method: str, parameters: dict[str, Any]) -> Any:
        if method not in STARTUP | ALWAYS | RUNTIME:
            raise Fault(-32601, "Method not found")
        if method in STARTUP and self.started:
            raise Fault(-1, ONLY_BEFORE)
        if method in RUNTIME and not self.started:
            raise Fault(-1, ONLY_AFTER)
        handler: Callable[..., Any] = getattr(self, f"_{method}")
        return json.loads(json.dumps(handler(**parameters)))

    # -- process ------------------------------------------------------------------------------------------------------

    def _spdk_get_version(self) -> Any:
        return self.version

    def _rpc_get_methods(self, current: bool = False) -> Any:
        if not current:
            return self.methods or sorted(STARTUP | ALWAYS | RUNTIME)
        return sorted(ALWAYS | (RUNTIME if self.started else STARTUP))

    def _iobuf_set_options(self, **options: Any) -> Any:
        self.iobuf_options = options
        return True

    def _framework_start_init(self) -> Any:
        self.started = True
        return True

    def _framework_wait_init(self) -> Any:
        return True

    def _bdev_malloc_create(self, name: str, num_blocks: int, block_size: int) -> Any:
        if name in self.bdevs:
            raise Fault(-17, "File exists")
        self.bdevs.append(name)
        return name

    def _bdev_delay_create(self, base_bdev_name: str, name: str, **_latencies: int) -> Any:
        if name in self.bdevs or base_bdev_name not in self.bdevs:
            raise Fault(-17 if name in self.bdevs else -19, "it is there, or its base is not")
        self.bdevs.append(name)
        return name

    def _bdev_aio_create(self, name: str, filename: str, block_size: int, fallocate: bool, uuid: str) -> Any:
        if not Path(filename).exists():
            raise Fault(-2, "No such file or directory")
        if name in self.bdevs:
            raise Fault(-17, "File exists")
        self.bdevs.append(name)
        self.aio[name] = {"uuid": uuid, "driver_specific": {"aio": {"filename": filename, "fallocate": fallocate}}}
        return name

    def _bdev_aio_delete(self, name: str) -> Any:
        """With the namespaces that show it."""
        if name not in self.aio:
            raise Fault(-19, "No such device")
        for subsystem in self.subsystems.values():
            shown = [nsid for nsid, namespace in subsystem.namespaces.items() if namespace["bdev_name"] == name]
            for nsid in shown:
                del subsystem.namespaces[nsid]
        self.bdevs.remove(name)
        del self.aio[name]
        self.rate_limits.pop(name, None)
        return True

    def _bdev_get_bdevs(self, name: str | None = None) -> Any:
        if name is not None and name not in self.bdevs:
            raise Fault(-19, "No such device")
        nothing = dict.fromkeys(("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec"), 0)
        return [
            {
                "name": there,
                "assigned_rate_limits": nothing | self.rate_limits.get(there, {}),
                **self.aio.get(there, {}),
            }
            for there in self.bdevs
            if name in (None, there)
        ]

    def _bdev_set_qos_limit(self, name: str, **limits: int) -> Any:
        if name not in self.bdevs:
            raise Fault(-19, "No such device")
        self.rate_limits[name] = self.rate_limits.get(name, {}) | limits
        return True

    def _keyring_file_add_key(self, name: str, path: str) -> Any:
        if name in self.keys:
            raise Fault(-17, "File exists")
        if not path.startswith("/"):
            raise Fault(-1, "Operation not permitted")
        self.keys[name] = path
        return True

    def _keyring_get_keys(self) -> Any:
        return [{"name": name, "module": "keyring_file", "removed": False} for name in self.keys]

    def _keyring_file_remove_key(self, name: str) -> Any:
        if self.keys.pop(name, None) is None:
            raise Fault(-126, "Required key not available")
        return True

    # -- transports and subsystems ------------------------------------------------------------------------------------

    def _nvmf_create_transport(self, trtype: str, **options: Any) -> Any:
        if trtype in self.transports:
            raise Fault(-32603, f"Transport type '{trtype}' already exists")
        size = options.get("max_io_size", 131072)
        if size < 8192 or size & (size - 1):
            raise Fault(-32603, f"Transport type '{trtype}' create failed")
        self.transports[trtype] = {"trtype": trtype, "max_io_size": size, **options}
        return True

    def _nvmf_get_transports(self) -> Any:
        return list(self.transports.values())

    def _nvmf_get_subsystems(self) -> Any:
        return [DISCOVERY, *(self.subsystems[nqn].report() for nqn in sorted(self.subsystems))]

    def _nvmf_create_subsystem(self, nqn: str, **options: Any) -> Any:
        if nqn in self.subsystems:
            raise Fault(-32603, f"Unable to create subsystem {nqn}")
        assert options["ana_reporting"]
        self.subsystems[nqn] = FakeSubsystem(
            nqn, options["serial_number"], options["model_number"], options["max_namespaces"], options["allow_any_host"]
        )
        return True

    def _nvmf_delete_subsystem(self, nqn: str) -> Any:
        if any(pair.host_nqn in self.stuck_hosts for pair in self._subsystem(nqn).pairs):
            raise TimeoutError  # it waits for ever
        del self.subsystems[nqn]
        return True

    def _nvmf_subsystem_allow_any_host(self, nqn: str, allow_any_host: bool) -> Any:
        self._subsystem(nqn).allow_any_host = allow_any_host
        return True

    def _nvmf_subsystem_add_ns(self, nqn: str, namespace: dict[str, Any]) -> Any:
        subsystem, nsid, bdev = self._subsystem(nqn), namespace["nsid"], namespace["bdev_name"]
        claimed = {there["bdev_name"] for other in self.subsystems.values() for there in other.namespaces.values()}
        if nsid in subsystem.namespaces or nsid > subsystem.max_namespaces:
            raise INVALID
        if bdev not in self.bdevs or bdev in claimed:
            raise INVALID
        subsystem.namespaces[nsid] = {
            "nsid": nsid,
            "bdev_name": bdev,
            "name": bdev,
            "nguid": namespace["nguid"].upper(),
            "uuid": namespace["uuid"],
            "anagrpid": namespace["anagrpid"],
        }
        return nsid

    def _nvmf_subsystem_remove_ns(self, nqn: str, nsid: int) -> Any:
        if self._subsystem(nqn).namespaces.pop(nsid, None) is None:
            raise INVALID
        return True

    def _framework_get_config(self, name: str) -> Any:
        assert name == "nvmf"
        return [entry for there in self.subsystems.values() for entry in there.config()]

    # -- hosts and listeners ------------------------------------------------------------------------------------------

    def _nvmf_subsystem_add_host(
        self, nqn: str, host: str, dhchap_key: str | None = None, psk: str | None = None
    ) -> Any:
        subsystem = self._subsystem(nqn)
        if dhchap_key is not None and dhchap_key not in self.keys:
            raise INVALID
        if psk is not None and psk not in self.keys:
            raise INTERNAL
        if host in subsystem.hosts:
            raise INTERNAL
        subsystem.hosts[host] = dhchap_key
        if psk is not None:
            subsystem.psks[host] = psk
        return True

    def _nvmf_subsystem_set_keys(self, nqn: str, host: str, dhchap_key: str | None = None) -> Any:
        subsystem = self._subsystem(nqn)
        if dhchap_key is not None and dhchap_key not in self.keys:
            raise INVALID
        if host not in subsystem.hosts:
            raise Fault(-22, "Invalid argument")
        subsystem.hosts[host] = dhchap_key
        return True

    def _nvmf_subsystem_remove_host(self, nqn: str, host: str) -> Any:
        subsystem = self._subsystem(nqn)
        if host not in subsystem.hosts:
            raise INTERNAL
        del subsystem.hosts[host]
        subsystem.psks.pop(host, None)
        for pair in subsystem.pairs:
            if pair.host_nqn == host:
                pair.state = "deactivating"
        if host in self.stuck_hosts and subsystem.pairs:
            raise Fault(-32603, "Timeout reached during host removal")
        self.finish(host)
        if host in self.racing_hosts:
            self.racing_hosts.discard(host)
            subsystem.pairs += [Pair(host, 0)]
        return True

    def _nvmf_subsystem_get_qpairs(self, nqn: str) -> Any:
        return [
            {"cntlid": pair.controller, "qid": pair.qid, "state": pair.state, "thread": "nvmf_tgt_poll_group_000"}
            | {"hostnqn": pair.host_nqn}
            for pair in self._subsystem(nqn).pairs
        ]

    def _nvmf_subsystem_add_listener(
        self, nqn: str, listen_address: dict[str, str], ana_state: str, secure_channel: bool = False
    ) -> Any:
        subsystem = self._subsystem(nqn)
        if subsystem.listener(listen_address) >= 0 or listen_address["trtype"] not in self.transports:
            raise INVALID
        if secure_channel:
            subsystem.secure.add(listen_address["trsvcid"])
        subsystem.listeners.append((listen_address, ana_state))
        return True

    def _nvmf_subsystem_remove_listener(self, nqn: str, listen_address: dict[str, str]) -> Any:
        subsystem = self._subsystem(nqn)
        if (index := subsystem.listener(listen_address)) < 0:
            raise INVALID
        del subsystem.listeners[index]
        return True

    def _nvmf_subsystem_listener_set_ana_state(self, nqn: str, listen_address: dict[str, str], ana_state: str) -> Any:
        subsystem = self._subsystem(nqn)
        if (index := subsystem.listener(listen_address)) < 0:
            raise Fault(-32603, "error setting ANA state: -22")
        subsystem.listeners[index] = (listen_address, ana_state)
        return True

    def _nvmf_subsystem_get_listeners(self, nqn: str) -> Any:
        subsystem = self._subsystem(nqn)
        groups = range(1, subsystem.max_namespaces + 1)
        return [
            {"address": address, "ana_states": [{"ana_group": group, "ana_state": state} for group in groups]}
            for address, state in subsystem.listeners
        ]

    def _subsystem(self, nqn: str) -> FakeSubsystem:
        if nqn not in self.subsystems:
            raise Fault(-32602, f"Subsystem with NQN '{nqn}' not found")
        return self.subsystems[nqn]
