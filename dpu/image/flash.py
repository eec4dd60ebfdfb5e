"""The flash of one card, as a state machine: no I/O, no clock.

:meth:`Flash.begin` gives the first effect; for each effect the caller brings back one event to :meth:`Flash.next`, with
the time, and gets the next effect, until it is an :class:`~meshfusion.dpu.image.flash_types.End`. What it holds to:

- Nothing is done to the card before the service on it was drained; the card is looked at once more before it is reset,
  and left alone when an installation runs on it.
- Its log is emptied before, so that nothing said earlier counts as success; a failure in it stays one.
- Every phase has a deadline. A card that installs is never reset: whoever comes later looks on.
- Whatever happens, the settings of the rshim are put back at the end.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Final

from meshfusion.dpu.image import flash_words as words
from meshfusion.dpu.image.errors import FaultKind
from meshfusion.dpu.image.flash_types import (
    AbandonPush,
    BeginPush,
    ContinuePush,
    Deadlines,
    Drain,
    Drained,
    Effect,
    End,
    Event,
    Faulted,
    MiscRead,
    Outcome,
    Phase,
    Probe,
    Probed,
    Progress,
    PushEnded,
    PushMoved,
    ReadMisc,
    SetMisc,
    Snapshot,
    TakeRshim,
    Wait,
)
from meshfusion.dpu.image.install_log import InstallLog, Milestone, is_installing, new_lines
from meshfusion.dpu.image.misc import LOG_DISPLAY_LEVEL, Misc
from meshfusion.dpu.image.readiness import Readiness, Standing, standing_of

POLL_S: Final = 1.0
LOG_WHILE_PUSHING_S: Final = 2.0
RETRY_S: Final = 2.0
PROBE_S: Final = 5.0
GRACE_S: Final = 5.0
"""So long after a fatal line what follows it is still collected: it often tells the cause."""
PUSH_ATTEMPTS: Final = 2

_SHOW_LOG: Final = SetMisc("DISPLAY_LEVEL", LOG_DISPLAY_LEVEL)
_EMPTY_LOG: Final = SetMisc("CLEAR_ON_READ", 1)
_PASSING_FAULTS: Final = frozenset({FaultKind.BUSY, FaultKind.GONE, FaultKind.UNREACHABLE, FaultKind.OWNED_ELSEWHERE})
_PUSH_AGAIN: Final = frozenset({FaultKind.STALLED, FaultKind.GONE, FaultKind.UNREACHABLE, FaultKind.BROKEN})
_IS_UP: Final = frozenset({Milestone.LINUX_UP, Milestone.READY})

Steps = Generator[Effect, Event, None]
Asking = Generator[Effect, Event, Event]
Trying = Generator[Effect, Event, Faulted | None]


class _EndedError(Exception):
    """``may_go_on``: the card may still be at work, so that a later run is to look on."""

    def __init__(self, end: Phase, problem: str, next_step: str, *, may_go_on: bool = False) -> None:
        super().__init__(problem)
        self.end, self.problem, self.next_step, self.may_go_on = end, problem, next_step, may_go_on


class Flash:
    """``drain_within_s``: None when the service on the card is not to be drained. ``resumed``: where an earlier run
    with the same image left off. ``may_reset_installing``: even a card on which an installation seems to run."""

    def __init__(
        self,
        *,
        deadlines: Deadlines,
        drain_within_s: float | None,
        resumed: Snapshot | None = None,
        wanted_firmware_version: str | None = None,
        may_reset_installing: bool = False,
    ) -> None:
        self._deadlines = deadlines
        self._drain_within_s = drain_within_s
        self._wanted_firmware_version = wanted_firmware_version
        self._may_reset_installing = may_reset_installing
        # Of the phases in a journal, this one alone tells what was last done to the card, and that nobody has read its
        # log since: an installer may go on after a failure that it has told of.
        self._former = Phase.PUSHING if resumed is not None and resumed.phase is Phase.PUSHING else None
        self._notes: tuple[str, ...] = ()
        self._phase, self._log = Phase.DRAINING, InstallLog()
        if resumed is not None and resumed.phase.goes_on_by_itself:
            self._phase, self._log = resumed.phase, _whole(resumed.log)
            if self._log.wants_power_cycle:
                self._log = replace(self._log, wants_power_cycle=False)
                self._note("its installer had asked for a power cycle of the host; whether that was done is not known")
        self._now_s = self._entered_s = 0.0
        self._is_drained = self._is_pushing = self._was_reset = self._is_interrupted = False
        self._ring: tuple[str, ...] = ()
        self._done_bytes = self._total_bytes = 0
        self._fatal_since_s: float | None = None
        self._standing: Standing | None = None
        self._steps = self._run()

    def begin(self, now_s: float) -> Effect:
        self._now_s = self._entered_s = now_s
        return next(self._steps)

    def next(self, event: Event, now_s: float) -> Effect:
        """``event``: the answer to the last effect. Not to be called after an End."""
        self._now_s = now_s
        return self._steps.send(event)

    def interrupt(self) -> None:
        """The operator wants it to end: what :meth:`next` gives next leads there."""
        self._is_interrupted = True

    @property
    def snapshot(self) -> Snapshot:
        """To be kept before each effect is carried out."""
        was_reset_before = self._was_reset and self._phase is Phase.PREPARING
        return Snapshot(Phase.PUSHING if was_reset_before else self._phase, self._log)

    @property
    def progress(self) -> Progress:
        if self._phase is Phase.PUSHING:
            return Progress(self._phase, self._done_bytes, self._total_bytes, "")
        furthest = self._log.furthest
        return Progress(self._phase, furthest or 0, len(Milestone), furthest.label if furthest is not None else "")

    def _run(self) -> Steps:
        try:
            if not self._phase.goes_on_by_itself:
                yield from self._drain()
                yield from self._push()
            else:
                yield from self._do(_SHOW_LOG)
                yield from self._do(_EMPTY_LOG)
            yield from self._look_on()
            ended = _EndedError(Phase.DONE, "", "")
            if self._log.partial:
                ended = _EndedError(Phase.FAILED, words.partial(self._log.partial), words.PARTIAL_STEP)
        except _EndedError as error:
            ended = error
        outcome = self._outcome(ended)
        if self._is_pushing:
            yield AbandonPush()
        if self._phase is not Phase.DRAINING:
            yield SetMisc("CLEAR_ON_READ", 0)
            yield SetMisc("DISPLAY_LEVEL", 0)
        # Of a card that was not pushed to whole, a later run is to know where that ended.
        if not ended.may_go_on and self._phase.goes_on_by_itself:
            self._phase = ended.end
        yield End(outcome)

    def _outcome(self, ended: _EndedError) -> Outcome:
        state = words.card_state(
            self._phase, ended.end, is_drained=self._is_drained, was_reset=self._was_reset,
            done_bytes=self._done_bytes, total_bytes=self._total_bytes,
        )  # fmt: skip
        return Outcome(
            end=ended.end,
            in_phase=self._phase,
            problem=ended.problem,
            next_step=ended.next_step,
            card_state=state,
            standing=self._standing,
            notes=self._notes,
            log=self._log,
        )

    def _do(self, effect: Effect) -> Asking:
        event = yield effect
        if self._is_interrupted:
            raise _EndedError(Phase.STOPPED, "interrupted", words.GO_ON, may_go_on=True)
        return event

    # Before the card is touched.

    def _drain(self) -> Steps:
        if self._drain_within_s is None:
            return
        event = yield from self._do(Drain(self._drain_within_s))
        if isinstance(event, Faulted):
            if event.kind is not FaultKind.UNREACHABLE:
                raise _failed(event)
            self._note("no service answered there, so nothing was drained")
        elif isinstance(event, Drained):
            self._is_drained = True
            self._note(event.note)

    def _push(self) -> Steps:
        for attempt in range(1, PUSH_ATTEMPTS + 1):
            self._enter(Phase.PREPARING)
            yield from self._prepare()
            if self._phase.goes_on_by_itself:
                yield from self._do(_EMPTY_LOG)
                return
            fault = yield from self._move()
            self._is_pushing = fault is not None
            if fault is None:
                self._enter(Phase.INSTALLING)
                return
            if fault.kind not in _PUSH_AGAIN or attempt == PUSH_ATTEMPTS:
                raise _failed(fault)
            self._former = Phase.PUSHING  # the last bytes may have arrived, and only the answer not
            self._note(f"pushed again from the beginning, after: {fault.message}")
            yield from self._do(AbandonPush())
            self._is_pushing = False
            yield from self._do(Wait(self._now_s + RETRY_S))

    def _prepare(self) -> Steps:
        """Until the card was reset and takes bytes, or was found at work on what was pushed before."""
        while fault := (yield from self._prepare_once()):
            if fault.kind not in _PASSING_FAULTS or self._is_late(RETRY_S):
                raise _failed(fault)
            yield from self._do(Wait(self._now_s + RETRY_S))

    def _prepare_once(self) -> Trying:
        for effect in (TakeRshim(), _SHOW_LOG, ReadMisc(), _EMPTY_LOG, ReadMisc()):
            event = yield from self._do(effect)
            if isinstance(event, Faulted):
                return event
            if isinstance(event, MiscRead):
                self._check(event.misc)
                if self._phase.goes_on_by_itself:
                    return None
                yield from self._check_silence(event.misc)
        self._phase = Phase.PUSHING  # whoever finds that in the journal cannot know whether the card was reset
        self._is_pushing = True
        event = yield from self._do(BeginPush())
        if isinstance(event, Faulted):
            self._phase, self._is_pushing = Phase.PREPARING, False
            return event
        return None

    def _check(self, misc: Misc) -> None:
        if refusal := words.refusal(misc):
            raise _EndedError(Phase.FAILED, *refusal)
        if is_installing(misc.log) and not self._may_reset_installing:
            if self._former is not Phase.PUSHING:
                raise _EndedError(Phase.FAILED, *words.IS_INSTALLING)
            self._note("the card was found at work on what an earlier run had pushed")
            self._enter(Phase.INSTALLING)
            self._log = _whole(InstallLog().after(misc.log))
            self._ring = misc.log

    def _check_silence(self, misc: Misc) -> Steps:
        """Of a log that somebody has emptied, or that ends where an installer may begin, and of no flash that is known
        here: only a card that answers is known not to be at work."""
        furthest = InstallLog().after(misc.log).furthest
        may_be_at_work = furthest is None or furthest is Milestone.OS_STARTED
        if may_be_at_work and self._former is None and not self._may_reset_installing:
            event = yield from self._do(Probe())
            if not (isinstance(event, Probed) and event.seen.is_linux_up):
                raise _EndedError(Phase.FAILED, *words.SILENT)
        self._former = self._former or Phase.PREPARING  # it was looked at

    def _move(self) -> Trying:
        self._enter(Phase.PUSHING)
        self._was_reset = True
        self._done_bytes, self._log, self._ring, self._fatal_since_s = 0, InstallLog(), (), None
        log_due_s = self._now_s + LOG_WHILE_PUSHING_S
        while not self._is_late():
            if self._now_s >= log_due_s:
                yield from self._read_log()
                log_due_s = self._now_s + LOG_WHILE_PUSHING_S
                continue
            event = yield from self._do(ContinuePush())
            if isinstance(event, Faulted):
                return event
            if isinstance(event, PushEnded):
                return None
            assert isinstance(event, PushMoved), event
            self._done_bytes, self._total_bytes = event.done_bytes, event.total_bytes
        raise _EndedError(Phase.FAILED, self._late(), words.LATE_PUSH)

    # While it is at work by itself.

    def _look_on(self) -> Steps:
        """Until it is ready. Faults pass: the card, and the network, may be away while it restarts."""
        while True:
            yield from self._read_log()
            self._judge_log()
            if self._phase is Phase.SETTLING or self._is_late():
                event = yield from self._do(Probe())
                if isinstance(event, Probed):
                    seen = replace(event.seen, wanted_firmware_version=self._wanted_firmware_version)
                    self._standing = standing_of(self._log, seen)
                if self._is_settled():
                    return
                yield from self._do(Wait(self._now_s + PROBE_S))
            else:
                yield from self._do(Wait(self._now_s + POLL_S))

    def _read_log(self) -> Steps:
        event = yield from self._do(ReadMisc())
        if isinstance(event, MiscRead):
            self._log = self._log.after(new_lines(self._ring, event.misc.log))
            self._ring = event.misc.log
        if self._log.fatal and self._fatal_since_s is None:
            self._fatal_since_s = self._now_s

    def _judge_log(self) -> None:
        passed = self._log.passed
        if self._fatal_since_s is not None:
            if self._now_s - self._fatal_since_s >= GRACE_S:
                problem = f"the installer on the card failed: {self._log.fatal[0]}"
                raise _EndedError(Phase.FAILED, problem, words.INSTALLATION_STEP)
            return
        if self._phase is Phase.INSTALLING and Milestone.REBOOTING in passed:
            self._enter(Phase.RESTARTING)
        if self._phase is not Phase.SETTLING and passed & _IS_UP:
            if Milestone.INSTALLATION_FINISHED not in passed:
                raise _EndedError(Phase.FAILED, *words.NOT_INSTALLED)
            self._enter(Phase.SETTLING)

    def _is_settled(self) -> bool:
        """After a look at the card. Raises when it will not get any better, or took too long."""
        standing = self._standing
        if self._phase is Phase.SETTLING and standing is not None:
            if standing.readiness is Readiness.READY:
                return True
            if standing.readiness is Readiness.VERSION_MISMATCH:
                problem = f"it is flashed, but {standing.detail}"
                raise _EndedError(Phase.FAILED, problem, standing.readiness.next_step, may_go_on=True)
        if self._is_late():
            if standing is None:
                raise _EndedError(Phase.FAILED, self._late(), words.INSTALLATION_STEP, may_go_on=True)
            detail = f" ({standing.detail})" if standing.detail else ""
            problem = f"{self._late()}: {standing.readiness.value}{detail}"
            may_go_on = standing.readiness is not Readiness.UEFI_ONLY
            raise _EndedError(Phase.FAILED, problem, standing.readiness.next_step, may_go_on=may_go_on)
        return False

    def _enter(self, phase: Phase) -> None:
        self._phase, self._entered_s = phase, self._now_s

    def _is_late(self, ahead_s: float = 0.0) -> bool:
        return self._now_s + ahead_s - self._entered_s >= self._deadlines.of(self._phase)

    def _late(self) -> str:
        return f"{self._phase.value} took longer than the {self._deadlines.of(self._phase):g} s it may take"

    def _note(self, note: str) -> None:
        if note and note not in self._notes:
            self._notes = (*self._notes, note)


def _failed(fault: Faulted) -> _EndedError:
    return _EndedError(Phase.FAILED, fault.message, fault.next_step)


def _whole(log: InstallLog) -> InstallLog:
    """Of a card whose stream is known to be in it whole: what was said before is not heard again."""
    return replace(log, passed=log.passed | {Milestone.BF_CFG_FOUND})
