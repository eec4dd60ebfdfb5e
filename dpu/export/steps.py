"""The single changes that lead from actual to desired. Each is safe to apply alone and to stop after."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.dpu.export.desired import Address, Host, Listener, Namespace


@dataclass(frozen=True, slots=True)
class DenyAnyHost:
    nqn: str


@dataclass(frozen=True, slots=True)
class RemoveHost:
    nqn: str
    host_nqn: str


@dataclass(frozen=True, slots=True)
class RemoveListener:
    nqn: str
    address: Address


@dataclass(frozen=True, slots=True)
class RemoveNamespace:
    nqn: str
    nsid: int


@dataclass(frozen=True, slots=True)
class DeleteSubsystem:
    nqn: str


@dataclass(frozen=True, slots=True)
class CreateSubsystem:
    nqn: str
    serial: str


@dataclass(frozen=True, slots=True)
class AddNamespace:
    nqn: str
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class AddHost:
    nqn: str
    host: Host


@dataclass(frozen=True, slots=True)
class AddListener:
    nqn: str
    listener: Listener


@dataclass(frozen=True, slots=True)
class SetAnaState:
    nqn: str
    listener: Listener


Step = (
    DenyAnyHost
    | RemoveHost
    | RemoveListener
    | RemoveNamespace
    | DeleteSubsystem
    | CreateSubsystem
    | AddNamespace
    | AddHost
    | AddListener
    | SetAnaState
)
