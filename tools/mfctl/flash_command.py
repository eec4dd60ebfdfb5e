"""``mfctl dpu flash``, from its options to its result."""

from __future__ import annotations

from typing import Any

import click

from meshfusion.dpu.image.edge.journal_file import DEFAULT_FOLDER
from meshfusion.dpu.image.errors import ImageError
from meshfusion.dpu.image.flash_types import Outcome, Phase
from meshfusion.dpu.image.preflight import Consents, steps
from meshfusion.dpu.image.rollout import RolloutLimits, State
from meshfusion.tools.mfctl.flash_cards import BmcAccess, Image, read_image, refuse
from meshfusion.tools.mfctl.flash_jobs import Job, Wishes, opened_jobs, outcome_document, run_job
from meshfusion.tools.mfctl.flash_progress import FlashProgress
from meshfusion.tools.mfctl.flash_rollout import Results, Work, roll_out
from meshfusion.tools.mfctl.flash_targets import Target
from meshfusion.tools.mfctl.output import format_bytes, format_seconds, print_document, print_table
from meshfusion.tools.mfctl.progress import Progress


def flash_cards(targets: tuple[Target, ...], bmc: BmcAccess, options: dict[str, Any]) -> None:
    wishes = Wishes(
        deadlines=options["deadlines"],
        drain_within_s=None if options["no_drain"] else options["drain_within"],
        journal_folder=options["journal"] or DEFAULT_FOLDER,
        bmc=bmc,
        consents=Consents(host_network=options["host_network_elsewhere"]),
        may_reset_installing=options["reset_installing"],
        is_again=options["again"],
    )
    output_format = options["output_format"]
    with Progress("Checking the BFB") as progress:
        image = read_image(options["bundle"], options["bfb"], options["key"], progress.update)
    with opened_jobs(targets, image, wishes) as (jobs, problems):
        refuse(problems)
        if options["dry_run"]:
            _show_plan(jobs, image, wishes, output_format)
            return
        if not options["yes"]:
            _ask(jobs, image)
        limits = RolloutLimits(options["canaries"], options["max_unavailable"], options["max_failures"])
        with FlashProgress(is_quiet=output_format != "table") as bars:
            work: Work[Job, Outcome] = Work(
                lambda job, stop, told: run_job(job, image, wishes, stop, told), lambda out: out.end is Phase.DONE
            )
            results = roll_out(jobs, work, limits, bars)
    _show(results, image, output_format)
    _conclude(results)


def _show_plan(jobs: list[Job], image: Image, wishes: Wishes, output_format: str) -> None:
    cards = [{"card": job.target.name, "steps": _steps(job, image, wishes)} for job in jobs]
    if output_format != "table":
        print_document({"image": _image_document(image), "cards": cards}, output_format)
        return
    click.echo(f"{image.bundle.manifest.name} {image.bundle.manifest.version}, {_size(image)}; nothing is done now")
    for card in cards:
        click.echo(f"\n{card['card']}")
        rows = [(row["phase"], row["what"], row["deadline"]) for row in card["steps"]]  # type: ignore[index]
        print_table(("PHASE", "WHAT", "AT MOST"), [(p, w, format_seconds(s) if s else "") for p, w, s in rows])


def _steps(job: Job, image: Image, wishes: Wishes) -> list[dict[str, object]]:
    if job.is_done:
        return [{"phase": "done", "what": "was flashed with this image before; --again flashes it anew", "deadline": 0}]
    drain = "nothing, as --no-drain says"
    if wishes.drain_within_s is not None:
        drain = f"drain the service at {job.target.service} within {wishes.drain_within_s:g} s, until it has stopped"
    planned = steps(
        take=job.card.how_taken,
        push=job.card.how_pushed,
        drain=drain,
        total_bytes=image.stream.total_bytes,
        deadlines=wishes.deadlines,
    )
    phases = [{"phase": phase, "what": what, "deadline": deadline_s} for phase, what, deadline_s in planned]
    if job.looks_on:
        assert job.entry is not None
        names = [row["phase"] for row in phases]
        return phases[names.index(job.entry.snapshot.phase.value) :]
    return phases


def _ask(jobs: list[Job], image: Image) -> None:
    to_flash = [job for job in jobs if not (job.is_done or job.looks_on)]
    for job in to_flash:
        click.echo(f"{job.target.name}: {job.card.how_pushed}", err=True)
    if to_flash:
        count = "1 card" if len(to_flash) == 1 else f"{len(to_flash)} cards"
        what = f"{image.bundle.manifest.name} {image.bundle.manifest.version}"
        click.echo(f"What is on the boot drive of {count} will be lost; chunks in its pool stay.", err=True)
        click.confirm(f"Reset {count} and flash {what} ({_size(image)})?", abort=True, err=True)


def _show(results: Results[Outcome], image: Image, output_format: str) -> None:
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
            done = "was flashed with this image before" if state is State.DONE else results.why_stopped
            click.echo(f"{name}: {state.value}: {done}")
            continue
        click.echo(f"{name}: {outcome.end.value}: {outcome.problem or outcome.card_state}")
        if outcome.problem:
            click.echo(f"  while {outcome.in_phase.value}; the card: {outcome.card_state}")
            for line in (*outcome.log.fatal, *outcome.log.partial):
                click.echo(f"  its log: {line}")
            click.echo(f"  next step: {outcome.next_step}")
        for note in outcome.notes:
            click.echo(f"  note: {note}")
        if outcome.standing is not None and outcome.standing.unseen:
            click.echo(f"  not seen from here: {', '.join(outcome.standing.unseen)}")


def _conclude(results: Results[Outcome]) -> None:
    if results.is_interrupted:
        raise click.Abort
    left = [name for name, state in results.states.items() if state is not State.DONE]
    if left:
        step = next((o.next_step for name, o in results.outcomes.items() if name in left and o.next_step), "")
        raise ImageError(
            f"not flashed: {', '.join(left)}" + (f"; stopped, since {results.why_stopped}" if len(left) > 1 else ""),
            next_step=step or "Run the same command again.",
        )


def _image_document(image: Image) -> dict[str, object]:
    manifest = image.bundle.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "bundle_sha256": image.bundle.digest,
        "bfb_sha256": image.bfb.sha256,
        "size_bytes": image.stream.total_bytes,
    }


def _size(image: Image) -> str:
    return format_bytes(image.stream.total_bytes)
