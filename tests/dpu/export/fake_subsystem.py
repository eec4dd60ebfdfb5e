"""A subsystem of the stand-in for nvmf_tgt, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Fault(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


INVALID = Fault(-32602, "Invalid parameters")
INTERNAL = Fault(-32603, "Internal error")


@dataclass
class Pair:
    host_nqn: str
    qid: int
    state: str = "enabled"
    controller: int = 1


@dataclass
class FakeSubsystem:
    nqn: str
    serial: str
    model: str
    max_namespaces: int
    allow_any_host: bool
    namespaces: dict[int, dict[str, Any]] = field(default_factory=dict)
    hosts: dict[str, str | None] = field(default_factory=dict)
    psks: dict[str, str] = field(default_factory=dict)
    secure: set[str] = field(default_factory=set)  # ports whose listener was asked for with TLS
    listeners: list[tuple[dict[str, str], str]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def listener(self, address: dict[str, str]) -> int:
        """Its index; -1 when it is not there."""
        return next((index for index, (there, _) in enumerate(self.listeners) if there == address), -1)

    def config(self) -> list[dict[str, Any]]:
        """What of framework_get_config is used: the calls that would make hosts and listeners anew."""
        hosts = [
            {"nqn": self.nqn, "host": nqn}
            | ({"dhchap_key": key} if key is not None else {})
            | ({"psk": self.psks[nqn]} if nqn in self.psks else {})
            for nqn, key in reversed(self.hosts.items())
        ]
        listeners = [
            {"nqn": self.nqn, "listen_address": address, "secure_channel": address["trsvcid"] in self.secure}
            for address, _ in self.listeners
        ]
        return [
            *({"method": "nvmf_subsystem_add_host", "params": parameters} for parameters in hosts),
            *({"method": "nvmf_subsystem_add_listener", "params": parameters} for parameters in listeners),
        ]

    def report(self) -> dict[str, Any]:
        return {
            "nqn": self.nqn,
            "subtype": "NVMe",
            "listen_addresses": [address for address, _ in self.listeners],
            "allow_any_host": self.allow_any_host,
            "hosts": [
                {"nqn": nqn, **({"dhchap_key": key} if key is not None else {})}
                for nqn, key in reversed(self.hosts.items())
            ],
            "serial_number": self.serial,
            "model_number": self.model,
            "max_namespaces": self.max_namespaces,
            "passthrough": False,
            "min_cntlid": 1,
            "max_cntlid": 65519,
            "dmrsl": 2097152,
            "wzsl": 12,
            "namespaces": [self.namespaces[nsid] for nsid in sorted(self.namespaces)],
        }
