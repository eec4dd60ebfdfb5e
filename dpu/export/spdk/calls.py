"""The RPCs of each step. Pure: ``(method, parameters)``, as SPDK's schema of 26.09 has them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from meshfusion.dpu.export.actual import OTHER_KEY
from meshfusion.dpu.export.desired import ANA_GROUP, KEY_ID, MAX_NAMESPACES, Address, Host, HostKey
from meshfusion.dpu.export.steps import (
    AddHost,
    AddListener,
    AddNamespace,
    CreateSubsystem,
    DeleteSubsystem,
    DenyAnyHost,
    RemoveHost,
    RemoveListener,
    RemoveNamespace,
    SetAnaState,
    SetHostKey,
    Step,
)

Call = tuple[str, dict[str, Any]]

MODEL = "MeshFusion"

REQUIRED_METHODS = frozenset(
    {
        "framework_get_config",
        "framework_wait_init",
        "keyring_file_add_key",
        "keyring_file_remove_key",
        "nvmf_create_subsystem",
        "nvmf_create_transport",
        "nvmf_delete_subsystem",
        "nvmf_get_subsystems",
        "nvmf_get_transports",
        "nvmf_subsystem_add_host",
        "nvmf_subsystem_add_listener",
        "nvmf_subsystem_add_ns",
        "nvmf_subsystem_allow_any_host",
        "nvmf_subsystem_get_listeners",
        "nvmf_subsystem_get_qpairs",
        "nvmf_subsystem_listener_set_ana_state",
        "nvmf_subsystem_remove_host",
        "nvmf_subsystem_remove_listener",
        "nvmf_subsystem_remove_ns",
        "nvmf_subsystem_set_keys",
        "spdk_get_version",
    }
)
"""All that this package calls once SPDK has started; checked on every connect."""


def call_of(step: Step) -> Call:
    """The one RPC that does the step. The keys of its host must be in the keyring before."""
    match step:
        case DenyAnyHost(nqn):
            return "nvmf_subsystem_allow_any_host", {"nqn": nqn, "allow_any_host": False}
        case RemoveHost(nqn, host_nqn, _):
            return "nvmf_subsystem_remove_host", {"nqn": nqn, "host": host_nqn}
        case RemoveListener(nqn, address):
            return "nvmf_subsystem_remove_listener", {"nqn": nqn, "listen_address": listen_address(address)}
        case RemoveNamespace(nqn, nsid):
            return "nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": nsid}
        case DeleteSubsystem(nqn):
            return "nvmf_delete_subsystem", {"nqn": nqn}
        case CreateSubsystem(nqn, serial):
            return "nvmf_create_subsystem", {
                "nqn": nqn,
                "serial_number": serial,
                "model_number": MODEL,
                "allow_any_host": False,
                "ana_reporting": True,
                "max_namespaces": MAX_NAMESPACES,
            }
        case AddNamespace(nqn, namespace):
            parameters = {
                "nsid": namespace.nsid,
                "bdev_name": namespace.backing,
                "uuid": str(namespace.uuid),
                "nguid": namespace.nguid,
                "anagrpid": ANA_GROUP,
            }
            return "nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": parameters}
        case AddHost(nqn, host):
            named = {"dhchap_key": host.key, "psk": host.psk}
            keys = {name: key_name(host.nqn, key.id) for name, key in named.items() if key is not None}
            return "nvmf_subsystem_add_host", {"nqn": nqn, "host": host.nqn, **keys}
        case SetHostKey(nqn, host):
            assert host.key is not None
            parameters = {"nqn": nqn, "host": host.nqn, "dhchap_key": key_name(host.nqn, host.key.id)}
            return "nvmf_subsystem_set_keys", parameters
        case AddListener(nqn, listener, is_secure):
            return "nvmf_subsystem_add_listener", {
                "nqn": nqn,
                "listen_address": listen_address(listener.address),
                "ana_state": listener.ana_state.value,
                **({"secure_channel": True} if is_secure else {}),
            }
        case SetAnaState(nqn, listener):
            return "nvmf_subsystem_listener_set_ana_state", {
                "nqn": nqn,
                "listen_address": listen_address(listener.address),
                "ana_state": listener.ana_state.value,
            }


def plain_listeners(config: Any, address: Address) -> tuple[str, ...]:
    """NQNs of subsystems that listen at ``address`` without TLS, from the answer to framework_get_config of "nvmf"."""
    calls = (entry["params"] for entry in config if entry.get("method") == "nvmf_subsystem_add_listener")
    sought = listen_address(address)
    return tuple(
        parameters["nqn"]
        for parameters in calls
        if not parameters.get("secure_channel", False)
        and all(parameters["listen_address"].get(name) == value for name, value in sought.items())
    )


def listen_address(address: Address) -> dict[str, str]:
    return {
        "trtype": address.transport.upper(),
        "adrfam": {"ipv4": "IPv4", "ipv6": "IPv6"}[address.family],
        "traddr": address.ip,
        "trsvcid": str(address.service),
    }


def key_name(host_nqn: str, key_id: str) -> str:
    """Of a host's key in SPDK's keyring, which is one for all subsystems. It tells which key that is."""
    return f"mf-{hashlib.sha256(host_nqn.encode()).hexdigest()[:32]}-{key_id}"


def id_of_key(name: str) -> str:
    """That which :func:`key_name` was given; of a name that it never made, as earlier releases did: ``OTHER_KEY``."""
    found = re.fullmatch(rf"mf-[0-9a-f]{{32}}-({KEY_ID})", name)
    return found[1] if found else OTHER_KEY


def keys_of(host: Host) -> tuple[HostKey, ...]:
    return tuple(key for key in (host.key, host.psk) if key is not None)
