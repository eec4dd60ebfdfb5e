"""``mfctl dpu upgrade`` and ``rollback``, from their options to their result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from meshfusion.dpu.image.errors import ImageError, UpgradeRefusedError
from meshfusion.dpu.image.rollout import RolloutLimits
from meshfusion.dpu.image.slots.preflight import image_problems, steps
from meshfusion.dpu.image.slots.service_image import ServiceImage, read_service_image
from meshfusion.dpu.image.slots.types import Deadlines, Outcome, Phase
from meshfusion.jbof.config_problems import ConfigProblem
from meshfusion.tools.mfctl.consent import agree
from meshfusion.tools.mfctl.flash_progress import FlashProgress
from meshfusion.tools.mfctl.flash_rollout import Results, Work, roll_out
from meshfusion.tools.mfctl.output import format_bytes, format_seconds, print_document, print_table
from meshfusion.tools.mfctl.progress import Progress
from meshfusion.tools.mfctl.slot_jobs import SlotJob, SlotWishes, opened_slot_jobs, outcome_document, run_slot_job
from meshfusion.tools.mfctl.slot_targets import SlotTarget

_UNTOUCHED = (Phase.CHECKING, Phase.COPYING, Phase.UNPACKING)
"""The service runs as before in these."""


def upgrade_cards(targets: tuple[SlotTarget, ...], options: dict[str, Any]) -> None:
    """``options``: of ``mfctl dpu upgrade``; without ``bundle`` those of ``rollback``."""
    bundle: Path | None = options.get("bundle")
    image = None if bundle is None else _checked_image(bundle, options["key"])
    deadlines: Deadlines = options["deadlines"]
    wishes = SlotWishes(
        image, deadlines, options["steady"], options["drain_within"], no_way_back=options["no_way_back"]
    )
    output_format = options["output_format"]
    with opened_slot_jobs(targets, wishes) as (jobs, problems):
        _refuse(problems)
        if options["dry_run"]:
            _show_plan(jobs, wishes, output_format)
            return
        if not options["yes"]:
            _ask(jobs, wishes)
        limits = RolloutLimits(options["canaries"], options["max_unavailable"], options["max_failures"])
        work: Work[SlotJob, Outcome] = Work(
            lambda job, stop, told: run_slot_job(job, wishes, stop, told),
            is_success=lambda outcome: not outcome.problem,
            serves_as_before=lambda out: out.end is not Phase.FAILED or out.in_phase in _UNTOUCHED,
        )
        with FlashProgress(is_quiet=output_format != "table") as bars:
            results = roll_out(jobs, work, limits, bars)
    _show(results, image, output_format)
    _conclude(results, "upgraded" if image is not None else "rolled back")


def _checked_image(bundle: Path, key: Path | None) -> ServiceImage:
    with Progress("checking the bundle", left="no card was touched") as progress:
        image = read_service_image(bundle, None if key is None else key.read_bytes(), progress.update)
    _refuse(image_problems(image))
    return image


def _refuse(problems: Sequence[ConfigProblem]) -> None:
    if problems:
        step = "Nothing was done to any card. Correct what is named, and run the same command again."
        raise UpgradeRefusedError("no card is changed", tuple(problems), next_step=step)


def _show_plan(jobs: list[SlotJob], wishes: SlotWishes, output_format: str) -> None:
    cards = [{"card": job.name, "steps": _steps(job, wishes)} for job in jobs]
    if output_format != "table":
        print_document({"image": _image_document(wishes.image), "cards": cards}, output_format)
        return
    what = "back to the other slot" if wishes.image is None else f"{wishes.image.name}, {_size(wishes.image)}"
    click.echo(f"{what}; nothing is done now")
    for card in cards:
        click.echo(f"\n{card['card']}")
        rows = [(row["phase"], row["what"], row["deadline"]) for row in card["steps"]]  # type: ignore[index]
        print_table(("PHASE", "WHAT", "AT MOST"), [(p, w, format_seconds(s) if s else "") for p, w, s in rows])


def _steps(job: SlotJob, wishes: SlotWishes) -> list[dict[str, object]]:
    state = job.facts.state
    if state.trial is not None:
        what = "end the trial" if job.ends_trial else "go on with the trial that is on"
        return [{"phase": "probing", "what": f"{what}, of slot {state.trial.slot}", "deadline": 0}]
    drain = "what is open ends within the service's stop_grace_s"
    if job.target.service:
        drain = f"drain the service at {job.target.service} within {wishes.drain_within_s:g} s"
    planned = steps(state, job.wanted, wishes.deadlines, drain=drain, steady_s=wishes.steady_s)
    return [{"phase": phase, "what": what, "deadline": deadline_s} for phase, what, deadline_s in planned]


def _ask(jobs: list[SlotJob], wishes: SlotWishes) -> None:
    to_change = [job for job in jobs if job.facts.state.committed_digest != job.wanted.digest or job.ends_trial]
    if not to_change:
        return
    count = "1 card" if len(to_change) == 1 else f"{len(to_change)} cards"
    what = (
        f"{count} will be upgraded to {wishes.image.name} ({_size(wishes.image)})"
        if wishes.image
        else (f"{count} will go back to the service in the other slot")
    )
    lost = "On a way back chunks of the pool may be lost (--no-way-back)." if wishes.no_way_back else "Chunks stay."
    agree(f"{what}; the service stops and starts, and engines lose hits while it does. {lost}", yes=False)


def _show(results: Results[Outcome], image: ServiceImage | None, output_format: str) -> None:
    if output_format != "table":
        cards = [
            outcome_document(name, results.outcomes[name])
            if name in results.outcomes
            else {"card": name, "state": state.value}
            for name, state in results.states.items()
        ]
        document = {"image": _image_document(image), "why_stopped": results.why_stopped, "cards": cards}
        print_document(document, output_format)
        return
    for name, state in results.states.items():
        outcome = results.outcomes.get(name)
        if outcome is None:
            click.echo(f"{name}: {state.value}: {results.why_stopped}")
            continue
        click.echo(f"{name}: {outcome.end.value}: {outcome.problem or outcome.card_state}")
        if outcome.problem:
            click.echo(f"  while {outcome.in_phase.value}; the card: {outcome.card_state}")
            click.echo(f"  next step: {outcome.next_step}")
        for note in outcome.notes:
            click.echo(f"  note: {note}")


def _conclude(results: Results[Outcome], done: str) -> None:
    if results.is_interrupted:
        raise click.Abort
    left = [name for name in results.states if name not in results.outcomes or results.outcomes[name].problem]
    if left:
        step = next((o.next_step for name, o in results.outcomes.items() if name in left and o.next_step), "")
        raise ImageError(
            f"not {done}: {', '.join(left)}" + (f"; stopped, since {results.why_stopped}" if len(left) > 1 else ""),
            next_step=step or "Run the same command again.",
        )


def _image_document(image: ServiceImage | None) -> dict[str, object] | None:
    if image is None:
        return None
    manifest = image.bundle.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "service_version": image.wanted.version,
        "bundle_sha256": image.bundle.digest,
        "size_bytes": image.copied_bytes,
    }


def _size(image: ServiceImage) -> str:
    return format_bytes(image.copied_bytes)
