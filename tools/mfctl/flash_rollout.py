"""Many flashes at once, in the order of a rollout: a thread for each card at work, one that looks after them."""

from __future__ import annotations

import queue
import signal
import threading
from dataclasses import dataclass
from typing import Any

import click

from meshfusion.dpu.image.flash_types import Outcome, Phase, Progress
from meshfusion.dpu.image.rollout import Rollout, RolloutLimits, State
from meshfusion.tools.mfctl.flash_cards import Image
from meshfusion.tools.mfctl.flash_jobs import Job, Wishes, run_job
from meshfusion.tools.mfctl.flash_progress import FlashProgress
from meshfusion.tools.mfctl.service_access import with_access

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Results:
    """``outcomes``: of the cards that were begun with. ``why_stopped``: "" when the rollout went to its end."""

    states: dict[str, State]
    outcomes: dict[str, Outcome]
    why_stopped: str
    is_interrupted: bool


class _Running:
    def __init__(self, image: Image, wishes: Wishes, stop: threading.Event) -> None:
        self._image, self._wishes, self._stop = image, wishes, stop
        self.said: queue.SimpleQueue[tuple[str, Progress | Outcome | BaseException]] = queue.SimpleQueue()

    def begin(self, job: Job) -> None:
        call = with_access(lambda: self._run(job))
        # Not waited for at the end of the process: whoever interrupts twice wants it to end.
        threading.Thread(target=call, daemon=True, name=f"flash-{job.target.name}").start()

    def _run(self, job: Job) -> None:
        # A signal that this thread got would interrupt a write to the card.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        name = job.target.name
        try:
            told = run_job(job, self._image, self._wishes, self._stop, lambda p: self.said.put((name, p)))
        except BaseException as error:  # told to the thread that looks after all
            self.said.put((name, error))
        else:
            self.said.put((name, told))


def roll_out(jobs: list[Job], image: Image, wishes: Wishes, limits: RolloutLimits, progress: FlashProgress) -> Results:
    """Raises what a job raises that is no outcome, when all that runs has ended."""
    by_name = {job.target.name: job for job in jobs}
    rollout = Rollout(list(by_name), limits, done=frozenset(job.target.name for job in jobs if job.is_done))
    stop = threading.Event()
    running = _Running(image, wishes, stop)
    outcomes: dict[str, Outcome] = {}
    defects: list[BaseException] = []
    former: Any = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while not rollout.is_over:
            try:
                for name in rollout.begin_next():
                    running.begin(by_name[name])
                _hear(running, rollout, outcomes, defects, progress)
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
    running: _Running,
    rollout: Rollout,
    outcomes: dict[str, Outcome],
    defects: list[BaseException],
    progress: FlashProgress,
) -> None:
    try:
        name, said = running.said.get(timeout=_LOOK_S)
    except queue.Empty:
        return
    if isinstance(said, Progress):
        progress.update(name, said)
        return
    progress.ended(name)
    if isinstance(said, Outcome):
        outcomes[name] = said
    else:
        defects.append(said)
    rollout.ended(name, is_done=isinstance(said, Outcome) and said.end is Phase.DONE)
