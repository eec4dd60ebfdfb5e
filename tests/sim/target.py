"""Models of NVMe-oF targets: a process that lists subsystems, disconnects, drains, and forgets all when it restarts.

What decides is the real code: :class:`SpdkOfModel` and :class:`NvmetOfModel` are the service's targets with their two
calls to the outside, reading and applying a step, answered by the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from meshfusion.dpu.export.actual import Actual, ActualSubsystem, AllowedHost, Connection
from meshfusion.dpu.export.desired import Export, Host
from meshfusion.dpu.export.errors import StepPendingError, TargetUnreachableError
from meshfusion.dpu.export.nvmet.target import NvmetTarget, check
from meshfusion.dpu.export.plan import TargetKind
from meshfusion.dpu.export.spdk.target import SpdkTarget
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

UNREACHABLE_RATE = 0.02


@dataclass
class Pair:
    """A host's connection. ``is_live``: not being torn down, so that it may start writes."""

    host_nqn: str
    subsystem_nqn: str
    is_live: bool = True


class TargetModel:
    """``is_writing``: has the target accepted writes of this host that it has not finished? ``is_writing_to``: to this
    namespace? ``on_cut``: a host's connection breaks, and what it had under way there is not answered."""

    def __init__(
        self,
        kind: TargetKind,
        rng: random.Random,
        is_writing: Callable[[str], bool],
        is_writing_to: Callable[[str, int], bool],
        on_cut: Callable[[str], None],
    ) -> None:
        self.kind = kind
        self.starts = 1
        self.is_down = False
        self.is_flawless = False  # answers every call
        self.subsystems: dict[str, ActualSubsystem] = {}
        self.pairs: list[Pair] = []
        self._connecting: set[str] = set()  # hosts whose Connect is under way
        self._disabling: dict[str, int] = {}  # subsystem -> NSID: the kernel waits for requests in flight
        self._rng, self._is_writing, self._is_writing_to, self._on_cut = rng, is_writing, is_writing_to, on_cut

    def restart(self) -> None:
        """Nothing is left of what it was told."""
        self.starts += 1
        self.subsystems.clear()
        self.pairs.clear()
        self._connecting.clear()
        self._disabling.clear()

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def connect(self, host_nqn: str) -> bool:
        """Is it let in?"""
        self._drain()
        for nqn, there in self.subsystems.items():
            may = host_nqn in there.host_nqns and there.listeners and nqn not in self._disabling
            if may and not self.is_down and not any(pair.host_nqn == host_nqn for pair in self.pairs):
                self.pairs.append(Pair(host_nqn, nqn))
                return True
        return False

    def begin_connect(self, host_nqn: str) -> None:
        """It is let in before it is removed, and has its queue pairs after."""
        if any(host_nqn in there.host_nqns for there in self.subsystems.values()):
            self._connecting.add(host_nqn)

    def can_write(self, host_nqn: str) -> bool:
        return any(
            pair.host_nqn == host_nqn
            and pair.is_live
            and pair.subsystem_nqn not in self._disabling
            and bool(self.subsystems[pair.subsystem_nqn].namespaces)
            for pair in self.pairs
        )

    def shows(self, nsid: int) -> bool:
        """Is there a way to this namespace for anybody?"""
        return any(namespace.nsid == nsid for there in self.subsystems.values() for namespace in there.namespaces)

    def reaches(self, host_nqn: str, nsid: int) -> bool:
        """Would a command of this host be taken there?"""
        return any(
            pair.host_nqn == host_nqn
            and pair.is_live
            and self._disabling.get(pair.subsystem_nqn) != nsid
            and any(namespace.nsid == nsid for namespace in self.subsystems[pair.subsystem_nqn].namespaces)
            for pair in self.pairs
        )

    def lose(self, host_nqn: str) -> None:
        """The host ended, and its end of the connection with it."""
        for pair in self.pairs:
            if pair.host_nqn == host_nqn:
                pair.is_live = False

    # ---- what the service asks -----------------------------------------------------------------------------------

    @property
    def busy_with(self) -> str:
        self._drain()
        return "".join(f"{nqn}: a namespace waits for requests in flight" for nqn in self._disabling)

    def read(self) -> Actual:
        self._may_fail()
        self._drain()
        for host_nqn in sorted(self._connecting):  # it waits for Connects under way, which are checked anew
            self.connect(host_nqn)
        self._connecting.clear()
        return tuple(
            replace(
                there,
                connections=frozenset(
                    Connection(pair.host_nqn, pair.is_live) for pair in self.pairs if pair.subsystem_nqn == nqn
                ),
                pending="a namespace waits for requests in flight" if nqn in self._disabling else "",
            )
            for nqn, there in self.subsystems.items()
        )

    def apply(self, step: Step) -> None:
        self._may_fail()
        if self.busy_with:
            raise StepPendingError(self.busy_with, next_step="wait")
        self._do(step)
        self._may_fail()  # it is done, and the answer is lost

    def _do(self, step: Step) -> None:
        if isinstance(step, CreateSubsystem):
            assert step.nqn not in self.subsystems
            self.subsystems[step.nqn] = ActualSubsystem(step.nqn, step.serial)
            return
        there = self.subsystems[step.nqn]
        match step:
            case DenyAnyHost():
                there = replace(there, allow_any_host=False)
            case AddNamespace(_, namespace):
                there = replace(there, namespaces=there.namespaces | {namespace})
            case AddHost(_, host):
                there = replace(there, hosts=there.hosts | {allowed(host)})
            case SetHostKey(_, host, former_id):
                before = next(known for known in there.hosts if known.nqn == host.nqn)
                assert before.key_id == former_id
                there = replace(there, hosts=there.hosts - {before} | {allowed(host)})
            case AddListener(_, listener, _):
                there = replace(there, listeners=there.listeners | {listener})
            case SetAnaState(_, listener):
                others = frozenset(known for known in there.listeners if known.address != listener.address)
                there = replace(there, listeners=others | {listener})
            case RemoveListener(_, address):
                others = frozenset(known for known in there.listeners if known.address != address)
                there = replace(there, listeners=others)
            case RemoveHost(_, host_nqn, _):
                there = replace(there, hosts=frozenset(host for host in there.hosts if host.nqn != host_nqn))
                self._disconnect(step.nqn, host_nqn)
            case RemoveNamespace(_, nsid):
                there = self._without_namespace(there, nsid)
            case DeleteSubsystem():
                self._delete(step.nqn)
                return
        self.subsystems[step.nqn] = there

    def _disconnect(self, nqn: str, host_nqn: str) -> None:
        if self.kind is TargetKind.NVMET:
            return  # it stays connected
        self._cut([pair for pair in self.pairs if (pair.host_nqn, pair.subsystem_nqn) == (host_nqn, nqn)])
        if host_nqn in self._connecting:
            self._connecting.discard(host_nqn)
            self.pairs.append(Pair(host_nqn, nqn))

    def _without_namespace(self, there: ActualSubsystem, nsid: int) -> ActualSubsystem:
        """nvmet's disabling of a namespace refuses new requests at once, and waits for those in flight. So does SPDK,
        for longer than it is asked."""
        if any(self._is_writing_to(pair.host_nqn, nsid) for pair in self._pairs_of(there.nqn)):
            if self.kind is TargetKind.SPDK:
                raise TargetUnreachableError("a namespace waits for requests in flight", next_step="wait")
            self._disabling[there.nqn] = nsid
            raise StepPendingError("a namespace waits for requests in flight", next_step="wait")
        return replace(there, namespaces=frozenset(known for known in there.namespaces if known.nsid != nsid))

    def _delete(self, nqn: str) -> None:
        pairs = [pair for pair in self.pairs if pair.subsystem_nqn == nqn]
        self._cut(pairs)
        if any(self._is_writing(pair.host_nqn) for pair in pairs):
            raise TargetUnreachableError("it waits for requests in flight", next_step="wait")
        self.pairs = [pair for pair in self.pairs if pair.subsystem_nqn != nqn]
        del self.subsystems[nqn]

    def _cut(self, pairs: list[Pair]) -> None:
        for pair in pairs:
            if pair.is_live:
                pair.is_live = False
                self._on_cut(pair.host_nqn)

    def _drain(self) -> None:
        """What waited for requests in flight goes on where there are none any more."""
        self.pairs = [pair for pair in self.pairs if pair.is_live or self._is_writing(pair.host_nqn)]
        for nqn, nsid in list(self._disabling.items()):
            if not any(self._is_writing_to(pair.host_nqn, nsid) for pair in self._pairs_of(nqn)):
                del self._disabling[nqn]
                self.subsystems[nqn] = self._without_namespace(self.subsystems[nqn], nsid)

    def _pairs_of(self, nqn: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.subsystem_nqn == nqn]

    def _may_fail(self) -> None:
        if self.is_down or (not self.is_flawless and self._rng.random() < UNREACHABLE_RATE):
            raise TargetUnreachableError("the target does not answer", next_step="wait")


def allowed(host: Host) -> AllowedHost:
    """As it is reported when it was let in."""
    return AllowedHost(host.nqn, "" if host.key is None else host.key.id, "" if host.psk is None else host.psk.id)


class SpdkOfModel(SpdkTarget):
    def __init__(self, model: TargetModel, desired: Export) -> None:
        self._model = model
        self._desired = desired
        self._rpc = self._settings = cast(Any, _NoBdevs())

    def read(self, desired: Export) -> Actual:
        return self._model.read()

    def apply(self, step: Step) -> None:
        self._model.apply(step)


class _NoBdevs:
    def drop(self, rpc: object, backing: str) -> None:
        """Bdevs are not modelled."""


class NvmetOfModel(NvmetTarget):
    def __init__(self, model: TargetModel, desired: Export) -> None:
        self._model = model
        self._desired = check(desired)
        self._worker = model  # type: ignore[assignment]  # what is asked of it is what it is busy with

    def read(self, desired: Export) -> Actual:
        return self._model.read()

    def apply(self, step: Step) -> None:
        self._model.apply(step)
