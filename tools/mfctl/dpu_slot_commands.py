"""``mfctl dpu upgrade``, ``rollback`` and ``status``: the service on a card, without flashing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.tools.mfctl.consent import destructive
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_option

if TYPE_CHECKING:
    from meshfusion.dpu.image.slots.types import Deadlines
    from meshfusion.tools.mfctl.slot_targets import SlotTarget

_PATH = click.Path(path_type=Path, readable=False)
_PHASES = (
    "checking", "copying", "unpacking", "draining", "switching", "probing", "committing", "rolling-back",
)  # fmt: skip


def _places(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Any:
    from meshfusion.jbof.errors import FieldValueError
    from meshfusion.tools.mfctl.slot_targets import parse_ssh_place

    try:
        return tuple(map(parse_ssh_place, value))
    except FieldValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _deadlines(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Deadlines:
    from meshfusion.dpu.image.slots.types import Deadlines

    given: dict[str, float] = {}
    for text in value:
        phase, _, seconds = text.partition("=")
        if phase not in _PHASES:
            raise click.BadParameter(f"{text!r} names no phase; there are {', '.join(_PHASES)}", ctx, param)
        given[f"{phase.replace('-', '_')}_s"] = FiniteRange(1, 86_400).convert(seconds, param, ctx)
    return Deadlines(**given)


_CARD_OPTIONS = (
    click.argument("places", nargs=-1, callback=_places, metavar="[CARD]..."),
    click.option("--targets", type=_PATH, metavar="FILE", help="A file that names the cards, instead of CARD."),
)
_CHANGE_OPTIONS = (
    *_CARD_OPTIONS,
    click.option(
        "--service", default="", metavar="ADDRESS",
        help="The chunk service on the one CARD, to be drained over its API before it stops.",
    ),
    click.option(
        "--drain-within", type=FiniteRange(0, 3600), default=60.0, show_default=True, metavar="SECONDS",
        help="With --service: what is open on it may end in this time.",
    ),
    click.option(
        "--steady", type=FiniteRange(0, 3600), default=40.0, show_default=True, metavar="SECONDS",
        help="So long the new service is to be ready without a break before it is committed.",
    ),
    click.option(
        "--deadline", "deadlines", multiple=True, callback=_deadlines, metavar="PHASE=SECONDS",
        help=f"How long a phase may take; one of {', '.join(_PHASES)}.",
    ),
    click.option(
        "--no-way-back", is_flag=True,
        help="Also where the former service could not open the pool any more. Needs --yes.",
    ),
    click.option(
        "--canaries", type=click.IntRange(0), default=1, show_default=True, metavar="COUNT",
        help="Cards to begin with.",
    ),
    click.option(
        "--max-unavailable", type=click.IntRange(1), default=1, show_default=True, metavar="COUNT",
        help="Most cards out of service at a time.",
    ),
    click.option(
        "--max-failures", type=click.IntRange(0), default=0, show_default=True, metavar="COUNT",
        help="After more, none begins.",
    ),
    click.option("--dry-run", is_flag=True, help="Check everything and show each step; change nothing."),
    destructive,
    format_option,
)  # fmt: skip


def _with(options: tuple[Any, ...]) -> Any:
    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


@click.command()
@click.option("--bundle", type=_PATH, required=True, metavar="FOLDER", help="The service bundle that is to run.")
@click.option("--key", type=_PATH, metavar="FILE", help="Public key (PEM) that the bundle must be signed with.")
@_with(_CHANGE_OPTIONS)
def upgrade(**options: Any) -> None:
    """Change the service on CARDs, [USER@]HOST[:PORT] of their Linux, to that of a bundle, without flashing.

    It is copied and unpacked beside the one that runs. Then that one stops and the new one starts, on trial: when it
    has not written and read a chunk in time, or ends, or nobody commits it, the former one comes back, by itself if
    need be. Engines lose hits meanwhile. Run again, it goes on where the card is.

    Exits 1 when a card was not upgraded, 130 when interrupted; the former service runs then.
    """
    from meshfusion.tools.mfctl.slot_command import upgrade_cards

    upgrade_cards(_targets(options), options)


@click.command()
@_with(_CHANGE_OPTIONS)
def rollback(**options: Any) -> None:
    """Go back to the service in the other slot of CARDs, [USER@]HOST[:PORT] of their Linux.

    While a slot is on trial, the trial is ended. Else the other slot is tried as in an upgrade, and what runs now comes
    back if it is no good.
    """
    from meshfusion.tools.mfctl.slot_command import upgrade_cards

    upgrade_cards(_targets(options), options)


@click.command()
@_with((*_CARD_OPTIONS, format_option))
def status(output_format: str, **options: Any) -> None:
    """Tell what the slots of CARDs hold, which one runs, whether it is ready, and what is on trial.

    Exits 1 unless all are ready and nothing is on trial.
    """
    from meshfusion.tools.mfctl.slot_status import show_status

    if not show_status(_targets(options), output_format):
        raise click.exceptions.Exit(1)


def _targets(options: dict[str, Any]) -> tuple[SlotTarget, ...]:
    from meshfusion.tools.mfctl.slot_targets import SlotTarget, read_slot_targets

    places, path, service = options["places"], options["targets"], options.get("service", "")
    if bool(places) == (path is not None):
        raise click.UsageError("Name either CARDs or --targets FILE.")
    if service and len(places) != 1:
        raise click.UsageError("--service is for one CARD; for more, name their services in --targets FILE.")
    if options.get("no_way_back") and not (options["yes"] or options["dry_run"]):
        raise click.UsageError("--no-way-back needs --yes: chunks may be lost on the way back.")
    if path is not None:
        return read_slot_targets(path)
    if len(set(places)) != len(places):
        raise click.UsageError("A CARD is named twice.")
    return tuple(SlotTarget(str(place), place, service) for place in places)
