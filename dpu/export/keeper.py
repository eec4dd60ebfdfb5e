"""Keeps a target as the pool's holders need it: who may reach the data does, who must go is cut off and proven gone.

The pool says who is to be served and who is condemned; the keeper looks again every ``period_s``, and at once when it
is woken. Nothing else is remembered: restarts of the target, of the service, or of both end in the same state.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from meshfusion.dpu.api.service_types import KeyChange
from meshfusion.dpu.api.types import Export as Reach
from meshfusion.dpu.export.actual import Actual
from meshfusion.dpu.export.desired import Export
from meshfusion.dpu.export.drive_showing import DrivesNow
from meshfusion.dpu.export.errors import ExportError
from meshfusion.dpu.export.fence import Confirmed, Fence, NotYet
from meshfusion.dpu.export.key_keeping import KeyKeeping
from meshfusion.dpu.export.plan import ExportPlan, check_bdevs
from meshfusion.dpu.export.reconcile import Report
from meshfusion.jbof.errors import MeshFusionError, ServiceUnavailableError
from meshfusion.jbof.pool_addresses import namespace_of

logger = logging.getLogger("meshfusion.exports")

PERIOD_S = 2.0
CLOSE_S = 5.0
ALARM_S = 30.0
"""A host that is not confirmed to be gone for so long is told to people again."""


class FencingTarget(Protocol):
    """What is used of :class:`~meshfusion.dpu.export.nvmet.target.NvmetTarget` and of
    :class:`~meshfusion.dpu.export.spdk.target.SpdkTarget`."""

    def desire(self, desired: Export) -> Report: ...

    def read(self, desired: Export) -> Actual: ...

    def fence(self, host_nqn: str) -> Fence: ...

    def withdraw(self, nsid: int, backing: str) -> Fence: ...


class Holders(Protocol):
    """The pool's side. Called on the keeper's thread."""

    def holders_to_serve(self) -> tuple[str, ...]: ...

    def holders_to_cut_off(self) -> tuple[str, ...]: ...

    def holder_is_cut_off(self, incarnation: str) -> None:
        """The target confirmed it: access is gone, and nothing of it is in flight."""
        ...


class Drives(Protocol):
    """The pool's drives. Called on the keeper's thread."""

    def drives_to_show(self) -> DrivesNow: ...

    def drive_is_taken_out(self, number: int) -> None:
        """The target confirmed it, of one that was outgoing: nobody reaches it, and nothing is in flight there."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """How things stand after one: who can connect, to which drives, and what is wrong."""

    served: frozenset[str]
    shown: frozenset[int]
    problem: str


class ExportKeeper:
    """Owns ``target``, which it uses on one thread of its own, from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        target: FencingTarget,
        plan: ExportPlan,
        *,
        period_s: float = PERIOD_S,
        key_lifetime_s: float = math.inf,
    ) -> None:
        self._target = target
        self._plan = plan
        self._period_s = period_s
        self._change = threading.Condition()
        self._rounds_wanted = 0
        self._rounds_done = 0
        self._last = Round(frozenset(), frozenset(), "the target was not asked yet")
        self._outgoing: dict[int, str] = {}  # drives that are not confirmed to be out, and why
        self._keys = KeyKeeping(plan.keys, key_lifetime_s)
        self._cut_off_since_s: dict[str, float] = {}  # when it began, or was last told of
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self, holders: Holders, drives: Drives) -> None:
        """Show these drives to those who are to be served, and to nobody else."""
        assert self._thread is None, "started twice"
        arguments = (holders, drives)
        self._thread = threading.Thread(target=self._loop, args=arguments, name="meshfusion-export", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Of what it keeps, see :attr:`~meshfusion.dpu.export.plan.ExportPlan.name`."""
        return self._plan.name

    @property
    def problem(self) -> str:
        """Why the target is not as it should be; empty when it is."""
        return self._last.problem

    def waits_for(self, number: int) -> str:
        """Why the target has not confirmed that nobody reaches the drive; empty: it has, or was not asked."""
        return self._outgoing.get(number, "")

    def check_can_show(self, number: int) -> None:
        """Raises ConfigError for a drive that this configuration could not export."""
        check_bdevs(self._plan, [number])

    def wake(self) -> None:
        """Somebody or a drive came, or must go."""
        with self._change:
            self._rounds_wanted += 1
            self._change.notify_all()

    def check(self, *, deadline_s: float) -> None:
        """Asked before a host is listed for :meth:`admit`: nobody can be admitted while the target is not as it should
        be, and hosts ask again and again, each time as another one that must then be cut off. Raises as that does."""
        if not self._is_true_in_time(lambda: not self._last.problem, deadline_s):
            raise self._refusal()

    def prepare(self, incarnation: str) -> None:
        """Before the pool lists it: what its target will ask for is there. Raises MediaError."""
        for secrets in self._plan.secrets:
            secrets.make(incarnation)

    def forget(self, incarnation: str) -> None:
        """It is gone for good."""
        for secrets in self._plan.secrets:
            secrets.forget(incarnation)

    def forget_all_but(self, incarnations: Iterable[str]) -> None:
        """What is left of others."""
        kept = frozenset(incarnations)
        for secrets in self._plan.secrets:
            secrets.forget_all_but(kept)

    def admit(self, incarnation: str, numbers: Collection[int] = (), *, deadline_s: float) -> Reach:
        """Returns when the incarnation, which the pool wants served, can connect, and reaches these drives, which the
        pool wants shown.

        Raises :class:`~meshfusion.jbof.errors.ServiceUnavailableError` with the target's reason.
        """

        def is_admitted() -> bool:
            return incarnation in self._last.served and self._last.shown.issuperset(numbers)

        if not self._is_true_in_time(is_admitted, deadline_s):
            raise self._refusal()
        return self._plan.reach(incarnation, self._keys.there_id(incarnation))

    def hear(self, incarnation: str, known_id: str) -> str:
        """As :meth:`~meshfusion.dpu.export.key_keeping.KeyKeeping.hear`."""
        return self._keys.hear(incarnation, known_id)

    def replace_keys(self, incarnations: Collection[str], *, deadline_s: float) -> dict[str, KeyChange]:
        """As :meth:`~meshfusion.dpu.export.key_keeping.KeyKeeping.replace`."""
        return self._keys.replace(incarnations, self.wake, deadline_s=deadline_s)

    def _is_true_in_time(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Now, or by the end of a round that begins after this call."""
        end_s = time.monotonic() + deadline_s
        with self._change:
            if condition():
                return True
            self._rounds_wanted += 1
            self._change.notify_all()
            wanted = self._rounds_done + 1  # a round that began before may have missed it: then the next one
            while not condition():
                left_s = end_s - time.monotonic()
                if left_s <= 0 or self._rounds_done > wanted or self._is_closing:
                    return False
                self._change.wait(left_s)
            return True

    def _refusal(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(
            f"the data is not exported to this host: {self.problem or 'the target has not answered yet'}",
            next_step="see the service's log and `mfctl pool status`; is the target running?",
        )

    def close(self, *, deadline_s: float = CLOSE_S) -> bool:
        """Stop; what is exported stays so. False when the target has not answered what it was asked last: that may
        change it yet, so that nobody else may take the pool over before this process has ended."""
        with self._change:
            self._is_closing = True
            self._change.notify_all()
        self._keys.close()
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # ---- on the thread -------------------------------------------------------------------------------------------

    def _loop(self, holders: Holders, drives: Drives) -> None:
        while True:
            with self._change:
                if self._is_closing:
                    return
                wanted = self._rounds_wanted
            last = self._round(holders, drives)
            with self._change:
                self._last = last
                self._rounds_done += 1
                self._change.notify_all()
                self._wait_for_change(wanted)

    def _wait_for_change(self, rounds_wanted: int) -> None:
        self._change.wait_for(lambda: self._is_closing or self._rounds_wanted > rounds_wanted, self._period_s)

    def _round(self, holders: Holders, drives: Drives) -> Round:
        """Never raises: the next one tries again."""
        try:
            return self._make_so(holders, drives)
        except MeshFusionError as error:
            problem = error.message
        except Exception as error:  # a bug must not end the thread that fences
            logger.exception("keeping exports failed")
            problem = repr(error)
        self._tell(problem)
        return Round(frozenset(), frozenset(), problem)

    def _make_so(self, holders: Holders, drives: Drives) -> Round:
        now, wanted = drives.drives_to_show(), holders.holders_to_serve()
        self._keys.renew(wanted)
        plan = self._plan.showing(now.shown)
        desired = plan.export(wanted)
        report = self._target.desire(desired)
        problem = "; ".join(report.reasons)
        for incarnation in holders.holders_to_cut_off():
            if self._is_closing:
                break
            self._cut_off(incarnation, report.unreachable, holders)
        self._take_out(now, report.unreachable, drives)
        self._tell(problem)
        if report.unreachable is not None:
            return Round(frozenset(), frozenset(), problem)
        try:
            actual = self._target.read(desired)
        except ExportError as error:
            return Round(frozenset(), frozenset(), error.message)
        self._keys.found(plan.key_ids(actual, wanted))
        served = frozenset(incarnation for incarnation in wanted if plan.is_served(actual, incarnation))
        return Round(served, frozenset(plan.backings), problem)

    def _take_out(self, now: DrivesNow, unreachable: ExportError | None, drives: Drives) -> None:
        """What was not desired in this round, and so is on its way out of the target, may be confirmed to be."""
        waits: dict[int, str] = {}
        for number, place in now.outgoing.items():
            verdict: Fence = NotYet(unreachable.message if unreachable else "the service is ending")
            if unreachable is None and not self._is_closing:
                verdict = self._target.withdraw(namespace_of(number), self._plan.backing_of(number, place))
            if isinstance(verdict, NotYet):
                waits[number] = verdict.reason
                continue
            logger.info("drive %d is shown to nobody: nothing is in flight there", number)
            drives.drive_is_taken_out(number)
        self._outgoing = waits

    def _cut_off(self, incarnation: str, unreachable: ExportError | None, holders: Holders) -> None:
        """``unreachable``: why there is no use in asking the target, which may take long not to answer."""
        now_s, host_nqn = time.monotonic(), self._plan.host_nqn(incarnation)
        verdict: Fence = NotYet(unreachable.message) if unreachable else self._target.fence(host_nqn)
        if verdict == Confirmed():
            self._cut_off_since_s.pop(incarnation, None)
            logger.info("holder %s is cut off: its access is gone and its requests are done", incarnation)
            holders.holder_is_cut_off(incarnation)
            return
        since_s = self._cut_off_since_s.setdefault(incarnation, now_s)
        if now_s - since_s >= ALARM_S:
            self._cut_off_since_s[incarnation] = now_s
            logger.warning("holder %s is not cut off yet, its space stays quarantined: %s", incarnation, verdict)

    def _tell(self, problem: str) -> None:
        """Once, not at every round."""
        if problem and problem != self.problem:
            logger.warning("exports are not as they should be: %s", problem)
        elif self.problem and not problem:
            logger.info("exports are as they should be")
