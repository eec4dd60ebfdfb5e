"""The single changes that lead from actual to desired. Each is safe to apply alone and to stop after."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.dpu.export.desired import Address, Host, Listener, Namespace


@dataclass(frozen=True, slots=True)
class DenyAnyHost:
    nqn: str


@dataclass(frozen=True, slots=True)
class RemoveHost:
    """``key_ids``: of the secrets that the target knows it by."""

    nqn: str
    host_nqn: str
    key_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetHostKey:
    """From the next connection on the host needs ``host.key``; those that it has stay. ``former_id``: of the key that
    it needed so far."""

    nqn: str
    host: Host
    former_id: str


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
    """``is_secure``: for connections over TLS only."""

    nqn: str
    listener: Listener
    is_secure: bool = False


@dataclass(frozen=True, slots=True)
class SetAnaState:
    nqn: str
    listener: Listener


Step = (
    DenyAnyHost
    | RemoveHost
    | SetHostKey
    | RemoveListener
    | RemoveNamespace
    | DeleteSubsystem
    | CreateSubsystem
    | AddNamespace
    | AddHost
    | AddListener
    | SetAnaState
)
