"""SPDK's reports in the words of ``actual``. Pure; an answer of another shape raises ``UnsupportedError`` (rule 6)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import UUID

from meshfusion.dpu.export.actual import ActualSubsystem, AllowedHost, Connection
from meshfusion.dpu.export.desired import ANA_GROUP, Address, AnaState, Listener, Namespace
from meshfusion.dpu.export.spdk.calls import id_of_key
from meshfusion.jbof.errors import ConfigError, UnsupportedError

_Thing = TypeVar("_Thing", Namespace, Listener)

_TORN_DOWN = frozenset({"deactivating", "error"})
"""Queue pair states in which a host can start nothing more (lib/nvmf/nvmf_rpc.c, nvmf_qpair_state_str)."""


def is_nvm_subsystem(report: Any) -> bool:
    """Whether an entry of nvmf_get_subsystems is not the discovery subsystem."""
    return bool(report["subtype"] == "NVMe")


def psks_of(config: Any) -> dict[tuple[str, str], str]:
    """By (subsystem, host), the name of the key of TLS, from the answer to framework_get_config of "nvmf": nothing else
    tells it."""
    calls = (entry["params"] for entry in config if entry.get("method") == "nvmf_subsystem_add_host")
    return {(call["nqn"], call["host"]): call["psk"] for call in calls if "psk" in call}


def parse_subsystem(
    report: Any, listeners: Any, qpairs: Any, psks: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> ActualSubsystem:
    """From an entry of nvmf_get_subsystems, its nvmf_subsystem_get_listeners and nvmf_subsystem_get_qpairs, and
    :func:`psks_of` all."""
    try:
        oddities: list[str] = []
        return ActualSubsystem(
            nqn=report["nqn"],
            serial=report["serial_number"],
            allow_any_host=report["allow_any_host"],
            namespaces=frozenset(_each(map(_namespace, report["namespaces"]), oddities)),
            hosts=frozenset(_host(host, psks.get((report["nqn"], host["nqn"]))) for host in report["hosts"]),
            listeners=frozenset(_each(map(_listener, listeners), oddities)),
            connections=frozenset(Connection(pair["hostnqn"], pair["state"] not in _TORN_DOWN) for pair in qpairs),
            foreign="; ".join(oddities),
            backings=frozenset(namespace["bdev_name"] for namespace in report["namespaces"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(
            f"SPDK reports a subsystem in a form that is not known: {type(error).__name__} {error}",
            next_step="run a version of SPDK that this version of MeshFusion was tested with",
        ) from error


def _each(things: Iterable[_Thing | str], oddities: list[str]) -> Iterator[_Thing]:
    for thing in things:
        if isinstance(thing, str):
            oddities.append(thing)
        else:
            yield thing


def _host(report: Any, psk: str | None) -> AllowedHost:
    chap = id_of_key(report["dhchap_key"]) if "dhchap_key" in report else ""
    return AllowedHost(report["nqn"], chap, "" if psk is None else id_of_key(psk))


def _namespace(report: Any) -> Namespace | str:
    if report.get("anagrpid") != ANA_GROUP:
        return f"namespace {report['nsid']} is in ANA group {report.get('anagrpid', 'none')}"
    try:
        return Namespace(
            nsid=report["nsid"],
            uuid=UUID(report.get("uuid", "0" * 32)),
            nguid=report.get("nguid", "0" * 32).lower(),
            backing=report["bdev_name"],
        )
    except ConfigError as error:
        return error.message


def _listener(report: Any) -> Listener | str:
    address = report["address"]
    states = {state["ana_group"]: state["ana_state"] for state in report["ana_states"]}
    try:
        return Listener(
            Address(
                address["trtype"].lower(),
                str(ipaddress.ip_address(address["traddr"])),
                int(address["trsvcid"]),
            ),
            AnaState(states[ANA_GROUP]),
        )
    except (ValueError, ConfigError):
        return f"a listener at {address} in ANA state {states.get(ANA_GROUP)}"
