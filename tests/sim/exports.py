"""The keeper of exports of one life of the service, without its thread: it goes its rounds when the world says so."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.export.desired import Address, Export, Listener
from meshfusion.dpu.export.drive_showing import DrivesNow
from meshfusion.dpu.export.keeper import ExportKeeper, FencingTarget
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, nqn_prefix_of

_POOL: Final = uuid.UUID(int=7)
_LISTENERS: Final = frozenset({Listener(Address("rdma", "10.0.0.1"))})
ROUNDS_TO_ADMIT: Final = 2  # one may have begun before


def plan_of(kind: TargetKind) -> ExportPlan:
    return ExportPlan(kind, nqn_prefix_of(_POOL), _POOL, {}, _LISTENERS)


class _Keeper(ExportKeeper):
    def _tell(self, problem: str) -> None:
        """Nobody reads it here."""


@dataclass
class _Joining:
    holder_id: str
    on_answer: Callable[[bool], None]
    numbers: frozenset[int]
    rounds_left: int = ROUNDS_TO_ADMIT


@dataclass(frozen=True)
class Holders:
    """The pool's side."""

    holders_to_serve: Callable[[], tuple[str, ...]]
    holders_to_cut_off: Callable[[], tuple[str, ...]]
    holder_is_cut_off: Callable[[str], None]


@dataclass(frozen=True)
class Drives:
    """The pool's, as its target is told of them."""

    drives_to_show: Callable[[], DrivesNow]
    drive_is_taken_out: Callable[[int], None]


class Exports:
    def __init__(
        self, plan: ExportPlan, make_target: Callable[[Export], FencingTarget], holders: Holders, drives: Drives
    ) -> None:
        self._keeper = _Keeper(make_target(plan.export(())), plan)
        self._holders, self._drives = holders, drives
        self._joining: list[_Joining] = []

    def admit(self, holder_id: str, on_answer: Callable[[bool], None], numbers: frozenset[int] = frozenset()) -> None:
        """It is listed durably. ``on_answer``: can it connect now, and reach these drives? As the pool asks when a host
        attaches."""
        self._joining.append(_Joining(holder_id, on_answer, numbers))

    def go_round(self) -> str:
        """What is wrong with the target, as it is found; else empty."""
        self._keeper._last = last = self._keeper._make_so(self._holders, self._drives)
        joining, self._joining = self._joining, []
        for one in joining:
            one.rounds_left -= 1
            can_connect = one.holder_id in last.served and last.shown >= one.numbers
            if can_connect or not one.rounds_left:
                one.on_answer(can_connect)
            else:
                self._joining.append(one)
        return last.problem
