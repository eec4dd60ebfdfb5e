"""One card's part of a ``mfctl dpu upgrade`` or ``rollback``: what is known before it, and its run to the end."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshfusion.dpu.formats import Formats
from meshfusion.dpu.image.edge.shell import SshShell
from meshfusion.dpu.image.edge.slot_card import SlotCard
from meshfusion.dpu.image.edge.slot_driver import SlotSurroundings, run_upgrade
from meshfusion.dpu.image.errors import CardError
from meshfusion.dpu.image.slots.preflight import CardFacts, rollback_problems, upgrade_problems
from meshfusion.dpu.image.slots.service_image import ServiceImage, formats_of_config
from meshfusion.dpu.image.slots.types import Deadlines, Outcome, Phase, Progress, Wanted
from meshfusion.dpu.image.slots.upgrade import Upgrade
from meshfusion.jbof.config_problems import ConfigProblem, as_fix
from meshfusion.tools.mfctl.flash_jobs import drained
from meshfusion.tools.mfctl.slot_targets import SlotTarget


@dataclass(frozen=True, slots=True)
class SlotWishes:
    """What the operator asked for, of every card. ``image``: None to go back to what each card has besides."""

    image: ServiceImage | None
    deadlines: Deadlines
    steady_s: float
    drain_within_s: float
    no_way_back: bool = False


@dataclass
class SlotJob:
    """``wanted``: what is to run; ``ends_trial``: a trial is to be ended, and nothing else."""

    target: SlotTarget
    card: SlotCard
    facts: CardFacts
    wanted: Wanted
    ends_trial: bool = False

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def is_done(self) -> bool:
        """Left to the run, which also looks whether what is there is ready."""
        return False


@contextlib.contextmanager
def opened_slot_jobs(
    targets: tuple[SlotTarget, ...], wishes: SlotWishes
) -> Iterator[tuple[list[SlotJob], list[ConfigProblem]]]:
    """A job for each card, and what speaks against it. Nothing has been changed then."""
    jobs: list[SlotJob] = []
    problems: list[ConfigProblem] = []
    with contextlib.ExitStack() as stack:
        for target in targets:
            card = open_slot_card(target, wishes.image)
            stack.callback(_close, card)
            try:
                job, found = _opened(target, card, wishes)
            except CardError as error:
                problems.append(ConfigProblem(target.name, error.message, as_fix(error.next_step)))
                continue
            jobs.append(job)
            problems += [replace(problem, field=f"{target.name}: {problem.field}") for problem in found]
        yield jobs, problems


def open_slot_card(target: SlotTarget, image: ServiceImage | None = None) -> SlotCard:
    """Nothing is asked of it yet."""
    over = SshShell(target.place.destination, target.place.port)
    return SlotCard(over, None if image is None else image.read)


def _close(card: SlotCard) -> None:
    with contextlib.suppress(CardError):
        card.close()


def _opened(target: SlotTarget, card: SlotCard, wishes: SlotWishes) -> tuple[SlotJob, list[ConfigProblem]]:
    facts = card.facts()
    if wishes.image is not None:
        problems = upgrade_problems(facts, wishes.image, no_way_back=wishes.no_way_back)
        return SlotJob(target, card, facts, wishes.image.wanted), problems
    state = facts.state
    other = _formats_in(card, facts, state.spare)
    problems = rollback_problems(facts, other, no_way_back=wishes.no_way_back)
    if state.trial is not None:
        return SlotJob(target, card, facts, Wanted(state.committed_digest, ""), ends_trial=True), problems
    version = "" if other is None else other.version
    return SlotJob(target, card, facts, Wanted(state.slots.get(state.spare, ""), version)), problems


def _formats_in(card: SlotCard, facts: CardFacts, slot: str) -> Formats | None:
    return formats_of_config(card.config_of(slot)) if facts.state.slots.get(slot) else None


def run_slot_job(job: SlotJob, wishes: SlotWishes, stop: threading.Event, told: Callable[[Progress], None]) -> Outcome:
    upgrade = Upgrade(
        job.wanted,
        token=secrets.token_hex(8),
        deadlines=wishes.deadlines,
        steady_s=wishes.steady_s,
        drain_within_s=wishes.drain_within_s if job.target.service else None,
        ends_trial=job.ends_trial,
    )
    try:
        job.card.install()
    except CardError as error:
        return Outcome(Phase.FAILED, Phase.CHECKING, error.message, error.next_step, "nothing was changed")
    around = SlotSurroundings(drain=lambda within_s: drained(job.target.service, within_s), stop=stop, told=told)
    return run_upgrade(upgrade, job.card, around)


def outcome_document(card: str, outcome: Outcome) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "card": card,
        "state": outcome.end.value,
        "phase": outcome.in_phase.value,
        "problem": outcome.problem,
        "next_step": outcome.next_step,
        "card_state": outcome.card_state,
        "notes": list(outcome.notes),
    }
