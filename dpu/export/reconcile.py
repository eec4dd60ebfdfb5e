"""Reads a target, applies the difference, and reads again until there is none. The one path for creating, changing and
replaying: it runs on every (re)connect and after every change of what is desired, and doing it again does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshfusion.dpu.export.actual import Actual
from meshfusion.dpu.export.desired import Export
from meshfusion.dpu.export.diff import Waiting, diff
from meshfusion.dpu.export.errors import ExportError, StepPendingError, TargetUnreachableError
from meshfusion.dpu.export.steps import Step

MAX_ROUNDS = 8
"""Enough for the longest way: a change is made in at most four rounds (remove, delete, create, nothing left)."""


class Target(Protocol):
    """What can be read and changed step by step."""

    @property
    def removal_disconnects(self) -> bool:
        """See :func:`~meshfusion.dpu.export.diff.diff`."""

    def read(self, desired: Export) -> Actual:
        """Raises :class:`~meshfusion.dpu.export.errors.ExportError`."""

    def apply(self, step: Step) -> None:
        """Raises :class:`~meshfusion.dpu.export.errors.ExportError`; of these, ``TargetUnreachableError`` leaves open
        whether the step was done.
        """


@dataclass(frozen=True, slots=True)
class Failure:
    step: Step
    error: ExportError


@dataclass(frozen=True, slots=True)
class Report:
    """``applied``: how many steps were done. Try again later unless ``converged``."""

    applied: int
    failures: tuple[Failure, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    unreachable: ExportError | None = None
    converged: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not converged, for people."""
        reasons = [f"{failure.step}: {failure.error.message}" for failure in self.failures]
        reasons += [f"{waiting.nqn}: {waiting.reason}" for waiting in self.waiting]
        return (*reasons, *([self.unreachable.message] if self.unreachable else []))


def reconcile(target: Target, desired: Export) -> Report:
    """Never raises for the target's faults; they are in the report. A subsystem where a step fails is left as it is
    then; the others go on.
    """
    applied = 0
    try:
        for _ in range(MAX_ROUNDS):
            plan = diff(desired, target.read(desired), removal_disconnects=target.removal_disconnects)
            if not plan.steps:
                return Report(applied, waiting=plan.waiting, converged=not plan.waiting)
            failures: list[Failure] = []
            for step in plan.steps:
                if step.nqn in {failure.step.nqn for failure in failures}:
                    continue
                try:
                    target.apply(step)
                    applied += 1
                except TargetUnreachableError:
                    raise
                except ExportError as error:
                    failures.append(Failure(step, error))
            if failures:
                waiting = tuple(
                    Waiting(failure.step.nqn, failure.error.message)
                    for failure in failures
                    if isinstance(failure.error, StepPendingError)
                )
                failed = tuple(failure for failure in failures if not isinstance(failure.error, StepPendingError))
                return Report(applied, failed, (*plan.waiting, *waiting))
    except ExportError as error:
        return Report(applied, unreachable=error)
    return Report(applied, waiting=(Waiting("the target", f"not as desired after {MAX_ROUNDS} rounds"),))
