"""Many cards at once, in the order of a rollout: a thread for each card at work, one that looks after them."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import click

from meshfusion.dpu.image.rollout import Rollout, RolloutLimits, State
from meshfusion.tools.mfctl.flash_progress import FlashProgress, Standing
from meshfusion.tools.mfctl.service_access import with_access

_LOOK_S = 0.2


class Job(Protocol):
    """What is to be done to one card. ``is_done``: nothing, any more."""

    @property
    def name(self) -> str: ...
    @property
    def is_done(self) -> bool: ...


J = TypeVar("J", bound=Job)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Work(Generic[J, R]):
    """``run``: a job to its end; what stops it, and who is told how it stands. ``is_success``, ``serves_as_before``:
    of what came out."""

    run: Callable[[J, threading.Event, Callable[[Standing], None]], R]
    is_success: Callable[[R], bool]
    serves_as_before: Callable[[R], bool] = lambda _: False


@dataclass(frozen=True, slots=True)
class Results(Generic[R]):
    """``outcomes``: of the cards that were begun with. ``why_stopped``: "" when the rollout went to its end."""

    states: dict[str, State]
    outcomes: dict[str, R]
    why_stopped: str
    is_interrupted: bool


@dataclass(frozen=True, slots=True)
class _Stands:
    """In between."""

    standing: Standing


class _Running(Generic[J, R]):
    def __init__(self, work: Work[J, R], stop: threading.Event) -> None:
        self._work, self._stop = work, stop
        self.said: queue.SimpleQueue[tuple[str, _Stands | R | BaseException]] = queue.SimpleQueue()

    def begin(self, job: J) -> None:
        call = with_access(lambda: self._run(job))
        # Not waited for at the end of the process: whoever interrupts twice wants it to end.
        threading.Thread(target=call, daemon=True, name=f"card-{job.name}").start()

    def _run(self, job: J) -> None:
        # A signal that this thread got would interrupt a write to the card.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        name = job.name
        try:
            told = self._work.run(job, self._stop, lambda standing: self.said.put((name, _Stands(standing))))
        except BaseException as error:  # told to the thread that looks after all
            self.said.put((name, error))
        else:
            self.said.put((name, told))


def roll_out(jobs: Sequence[J], work: Work[J, R], limits: RolloutLimits, progress: FlashProgress) -> Results[R]:
    """Raises what a job raises that is no outcome, when all that runs has ended."""
    by_name = {job.name: job for job in jobs}
    rollout = Rollout(list(by_name), limits, done=frozenset(job.name for job in jobs if job.is_done))
    stop = threading.Event()
    running = _Running(work, stop)
    outcomes: dict[str, R] = {}
    defects: list[BaseException] = []
    former: Any = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while not rollout.is_over:
            try:
                for name in rollout.begin_next():
                    running.begin(by_name[name])
                _hear(running, work, rollout, outcomes, defects, progress)
            except KeyboardInterrupt:
                if stop.is_set():
                    raise
                stop.set()
                rollout.stop("interrupted")
                click.echo("interrupted: leaving the cards in a known state; once more ends at once", err=True)
    finally:
        signal.signal(signal.SIGTERM, former)
    if defects:
        raise defects[0]
    return Results(rollout.states, outcomes, rollout.why_stopped, stop.is_set())


def _hear(
    running: _Running[J, R],
    work: Work[J, R],
    rollout: Rollout,
    outcomes: dict[str, R],
    defects: list[BaseException],
    progress: FlashProgress,
) -> None:
    try:
        name, said = running.said.get(timeout=_LOOK_S)
    except queue.Empty:
        return
    if isinstance(said, _Stands):
        progress.update(name, said.standing)
        return
    progress.ended(name)
    if isinstance(said, BaseException):
        defects.append(said)
        rollout.ended(name, is_done=False)
        return
    outcomes[name] = said
    rollout.ended(name, is_done=work.is_success(said), serves_as_before=work.serves_as_before(said))
