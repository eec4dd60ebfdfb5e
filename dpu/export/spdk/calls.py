"""The RPCs of each step. Pure: ``(method, parameters)``, as SPDK's schema of 26.09 has them."""

from __future__ import annotations

import hashlib
from typing import Any

from meshfusion.dpu.export.desired import ANA_GROUP, MAX_NAMESPACES, Address
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
    Step,
)

Call = tuple[str, dict[str, Any]]

MODEL = "MeshFusion"

REQUIRED_METHODS = frozenset(
    {
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
        "spdk_get_version",
    }
)
"""All that this package calls once SPDK has started; checked on every connect."""


def call_of(step: Step) -> Call:
    """The one RPC that does the step. Keys of :class:`AddHost` must be in the keyring before."""
    match step:
        case DenyAnyHost(nqn):
            return "nvmf_subsystem_allow_any_host", {"nqn": nqn, "allow_any_host": False}
        case RemoveHost(nqn, host_nqn):
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
            key = {"dhchap_key": key_name(host.nqn)} if host.key_file is not None else {}
            return "nvmf_subsystem_add_host", {"nqn": nqn, "host": host.nqn, **key}
        case AddListener(nqn, listener):
            return "nvmf_subsystem_add_listener", {
                "nqn": nqn,
                "listen_address": listen_address(listener.address),
                "ana_state": listener.ana_state.value,
            }
        case SetAnaState(nqn, listener):
            return "nvmf_subsystem_listener_set_ana_state", {
                "nqn": nqn,
                "listen_address": listen_address(listener.address),
                "ana_state": listener.ana_state.value,
            }


def listen_address(address: Address) -> dict[str, str]:
    return {
        "trtype": address.transport.upper(),
        "adrfam": {"ipv4": "IPv4", "ipv6": "IPv6"}[address.family],
        "traddr": address.ip,
        "trsvcid": str(address.service),
    }


def key_name(host_nqn: str) -> str:
    """Of the host's key in SPDK's keyring, which is one for all subsystems."""
    return f"mf-{hashlib.sha256(host_nqn.encode()).hexdigest()[:32]}"
