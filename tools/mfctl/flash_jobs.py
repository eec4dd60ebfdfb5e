"""One card's part of a ``mfctl dpu flash``: what is known before it, and its run to the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshfusion.dpu.api.service_types import Phase as ServicePhase
from meshfusion.dpu.image.edge.card import Card
from meshfusion.dpu.image.edge.driver import Surroundings, run_flash
from meshfusion.dpu.image.edge.journal_file import JournalFile
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.flash import Flash
from meshfusion.dpu.image.flash_types import Deadlines, Outcome, Phase, Progress
from meshfusion.dpu.image.journal import Entry
from meshfusion.dpu.image.preflight import Consents, card_problems
from meshfusion.jbof.config_problems import ConfigProblem, as_fix
from meshfusion.jbof.errors import ServiceError, ServiceUnavailableError
from meshfusion.tools.mfctl.flash_cards import BmcAccess, Image, open_card
from meshfusion.tools.mfctl.flash_targets import Target
from meshfusion.tools.mfctl.service_drain import drain_service
from meshfusion.tools.mfctl.service_source import service_admin


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the operator asked for, of every card. ``drain_within_s``: None when nothing is to be drained."""

    deadlines: Deadlines
    drain_within_s: float | None
    journal_folder: Path
    bmc: BmcAccess
    consents: Consents
    may_reset_installing: bool = False
    is_again: bool = False


@dataclass
class Job:
    """``entry``: what an earlier run with the same image left. Holds the card's lock until :meth:`close`."""

    target: Target
    card: Card
    journal: JournalFile
    entry: Entry | None

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def is_done(self) -> bool:
        return self.entry is not None and self.entry.snapshot.phase is Phase.DONE

    @property
    def looks_on(self) -> bool:
        return self.entry is not None and self.entry.snapshot.phase.goes_on_by_itself

    def close(self) -> None:
        with contextlib.suppress(CardError):
            self.card.close()
        self.journal.close()


@contextlib.contextmanager
def opened_jobs(
    targets: tuple[Target, ...], image: Image, wishes: Wishes
) -> Iterator[tuple[list[Job], list[ConfigProblem]]]:
    """A job for each card, and what speaks against flashing them. Nothing has been changed then."""
    jobs: list[Job] = []
    problems: list[ConfigProblem] = []
    with contextlib.ExitStack() as stack:
        for target in targets:
            try:
                job, found = _opened(target, image, wishes, stack)
            except CardError as error:
                problems.append(ConfigProblem(target.name, error.message, as_fix(error.next_step)))
                continue
            jobs.append(job)
            problems += [replace(problem, field=f"{target.name}: {problem.field}") for problem in found]
        yield jobs, problems


def _opened(
    target: Target, image: Image, wishes: Wishes, stack: contextlib.ExitStack
) -> tuple[Job, list[ConfigProblem]]:
    card = open_card(target, wishes.bmc)
    try:
        journal = JournalFile(wishes.journal_folder, target.place.key)
    except (CardError, OSError):
        card.close()
        raise
    entry = journal.read()
    job = Job(target, card, journal, entry)
    stack.callback(job.close)
    if wishes.is_again and entry is not None and not entry.snapshot.phase.goes_on_by_itself:
        entry = None
    if wishes.may_reset_installing:
        entry = None
    if entry is not None and entry.image != image.digest:
        if entry.snapshot.phase.goes_on_by_itself:
            fix = "flash that one to its end, or say --reset-installing"
            return job, [ConfigProblem("journal", "another image is being installed on it", fix, entry.image)]
        entry = None
    job.entry = entry
    if job.is_done or job.looks_on:
        return job, []
    return job, [*_service_problems(target, wishes), *_card_problems(job, image, wishes)]


def _service_problems(target: Target, wishes: Wishes) -> list[ConfigProblem]:
    if target.service or wishes.drain_within_s is None:
        return []
    fix = "name it with --service or in the file of targets, or say --no-drain --yes"
    return [ConfigProblem("service", "is not named, so that it cannot be drained", fix)]


def _card_problems(job: Job, image: Image, wishes: Wishes) -> list[ConfigProblem]:
    return card_problems(job.card.facts(), image.bundle, image.bfb, wishes.consents)


def run_job(job: Job, image: Image, wishes: Wishes, stop: threading.Event, told: Callable[[Progress], None]) -> Outcome:
    """Raises OSError when the journal cannot be written, before anything was done to the card."""
    flash = Flash(
        deadlines=wishes.deadlines,
        drain_within_s=wishes.drain_within_s if job.target.service else None,
        resumed=job.entry.snapshot if job.entry is not None else None,
        wanted_firmware_version=image.bundle.manifest.nic_firmware,
        may_reset_installing=wishes.may_reset_installing,
    )
    around = Surroundings(drain=lambda within_s: drained(job.target.service, within_s), stop=stop, told=told)
    return run_flash(flash, job.card, image.stream, job.journal, image.digest, around)


def drained(address: str, within_s: float) -> str:
    """What the operator should know of it. Raises CardError."""
    try:
        with service_admin(address) as admin:
            last = drain_service(admin, within_s, lambda state: None, now_s=time.monotonic)
    except ServiceUnavailableError as error:
        raise CardError(FaultKind.UNREACHABLE, error.message, next_step=error.next_step) from error
    except ServiceError as error:
        raise CardError(FaultKind.REFUSED, error.message, next_step=error.next_step) from error
    if last.phase is not ServicePhase.CUT_SHORT:
        return ""
    return f"its service stopped with {last.open_write_count} writes and {last.open_lease_count} leases open"


def outcome_document(card: str, outcome: Outcome) -> dict[str, Any]:
    """As JSON has it."""
    standing = outcome.standing
    return {
        "card": card,
        "state": outcome.end.value,
        "phase": outcome.in_phase.value,
        "problem": outcome.problem,
        "next_step": outcome.next_step,
        "card_state": outcome.card_state,
        "readiness": standing.readiness.value if standing else None,
        "detail": standing.detail if standing else "",
        "unseen": list(standing.unseen) if standing else [],
        "notes": list(outcome.notes),
        "failure_lines": [*outcome.log.fatal, *outcome.log.partial],
    }
