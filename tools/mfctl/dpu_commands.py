"""``mfctl dpu``: flash cards, tell how far they are from serving, and change their service without a flash."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshfusion.tools.mfctl.dpu_slot_commands import rollback, status, upgrade
from meshfusion.tools.mfctl.numbers import FiniteRange
from meshfusion.tools.mfctl.output import format_option, print_document, print_fields

if TYPE_CHECKING:
    from meshfusion.dpu.image.flash_types import Deadlines
    from meshfusion.tools.mfctl.flash_cards import BmcAccess
    from meshfusion.tools.mfctl.flash_targets import Target

_PATH = click.Path(path_type=Path, readable=False)
_PHASES = ("draining", "preparing", "pushing", "installing", "restarting", "settling")


def _place(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    from meshfusion.jbof.errors import FieldValueError
    from meshfusion.tools.mfctl.flash_targets import parse_place

    try:
        return tuple(map(parse_place, value)) if isinstance(value, tuple) else parse_place(value)
    except FieldValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _deadlines(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Deadlines:
    from meshfusion.dpu.image.flash_types import Deadlines

    given: dict[str, float] = {}
    for text in value:
        phase, _, seconds = text.partition("=")
        if phase not in _PHASES:
            raise click.BadParameter(f"{text!r} names no phase; there are {', '.join(_PHASES)}", ctx, param)
        given[f"{phase}_s"] = FiniteRange(1, 86_400).convert(seconds, param, ctx)
    return Deadlines(**given)


_BMC_OPTIONS = (
    click.option(
        "--bmc-credentials", type=_PATH, metavar="FILE",
        help="With redfish://: a file with USER:PASSWORD, mode 0600; without it you are asked.",
    ),
    click.option("--bmc-ca", type=_PATH, metavar="FILE", help="Authority of the BMC's certificate."),
    click.option(
        "--bmc-fingerprint", default="", metavar="HEX", help="SHA-256 of the BMC's certificate; no authority then."
    ),
    click.option(
        "--bmc-ssh", default="", metavar="[USER@]HOST", help="Where ssh reads the log of the BMC's rshim.",
        show_default="root at the BMC",
    ),
)  # fmt: skip


def _bmc_options(command: Any) -> Any:
    for option in reversed(_BMC_OPTIONS):
        command = option(command)
    return command


@click.group()
def dpu() -> None:
    """Flash DPUs over rshim or their BMC, change their service without that, and see how they stand."""


for _command in (upgrade, rollback, status):
    dpu.add_command(_command)


@dpu.command()
@click.argument("places", nargs=-1, callback=_place, metavar="[CARD]...")
@click.option("--targets", type=_PATH, metavar="FILE", help="A file that names the cards, instead of CARD.")
@click.option("--bundle", type=_PATH, required=True, metavar="FOLDER", help="The service bundle, with our bf.cfg.")
@click.option("--bfb", type=_PATH, required=True, metavar="FILE", help="The operating system for the card, as a BFB.")
@click.option("--key", type=_PATH, metavar="FILE", help="Public key (PEM) that the bundle must be signed with.")
@click.option(
    "--service", default="", metavar="ADDRESS", help="The chunk service on the one CARD, to be drained first."
)
@click.option(
    "--drain-within", type=FiniteRange(0, 3600), default=60.0, show_default=True, metavar="SECONDS",
    help="What is open on the service may end in this time.",
)  # fmt: skip
@click.option("--no-drain", is_flag=True, help="Drain nothing: engines lose what they have open. Needs --yes.")
@click.option(
    "--deadline", "deadlines", multiple=True, callback=_deadlines, metavar="PHASE=SECONDS",
    help=f"How long a phase may take; one of {', '.join(_PHASES)}.",
)  # fmt: skip
@click.option("--host-network-elsewhere", is_flag=True, help="That the host, or you, may be cut off is known and fine.")
@click.option("--reset-installing", is_flag=True, help="Reset even a card on which an installation seems to run.")
@click.option("--again", is_flag=True, help="Flash also what was flashed with this image already.")
@click.option(
    "--canaries", type=click.IntRange(0), default=1, show_default=True, metavar="COUNT", help="Cards to begin with."
)
@click.option(
    "--max-unavailable", type=click.IntRange(1), default=1, show_default=True, metavar="COUNT",
    help="Most cards out of service at a time; those that failed count.",
)  # fmt: skip
@click.option(
    "--max-failures", type=click.IntRange(0), default=0, show_default=True, metavar="COUNT",
    help="After more, none begins.",
)  # fmt: skip
@_bmc_options
@click.option(
    "--serve-at", default="", metavar="ADDRESS[:PORT]", show_default="the one it sees",
    help="Address of this machine from which the BMC fetches what is flashed.",
)  # fmt: skip
@click.option(
    "--journal", type=_PATH, metavar="FOLDER", show_default="/var/lib/meshfusion/flash",
    help="Where is kept how far each card is, for a later run to go on.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check everything and show each step; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@format_option
@click.pass_context
def flash(context: click.Context, /, **options: Any) -> None:
    """Flash CARDs: rshimN here, ssh://[USER@]HOST[:PORT]/rshimN, or redfish://HOST[:PORT] over the BMC.

    The service on a card is drained, the card reset, the BFB and the bundle's bf.cfg pushed, and its log followed until
    it serves ssh again and its ports are back. What was on the card's boot drive is lost. Run again, it goes on where
    it was: a card at work is looked on at, one that is done is left alone.

    Exits 1 when a card was not flashed, 130 when interrupted; a card that installs goes on by itself then.
    """
    from meshfusion.tools.mfctl.flash_command import flash_cards

    flash_cards(_targets(options), _bmc(options), options)


@dpu.command()
@click.argument("place", callback=_place, metavar="CARD")
@click.option("--address", default="", metavar="ADDRESS", help="Of the card, where it is not 192.168.100.2.")
@_bmc_options
@format_option
def readiness(place: Any, address: str, output_format: str, **options: Any) -> None:
    """Tell how far CARD is from serving, and what to do next. Exits 1 unless it is ready.

    Nothing is done to the card; its rshim shows the log while it is read. Not while a flash follows that log: of two
    readers each gets but a part.
    """
    from meshfusion.tools.mfctl.flash_readiness import standing_at
    from meshfusion.tools.mfctl.flash_targets import Target

    standing = standing_at(Target(place.text, place, address=address), _bmc(options))
    if output_format != "table":
        print_document(
            {
                "card": place.text,
                "readiness": standing.readiness.value,
                "detail": standing.detail,
                "unseen": list(standing.unseen),
                "next_step": standing.readiness.next_step,
            },
            output_format,
        )
    else:
        rows = [("card", place.text), ("readiness", standing.readiness.value), ("detail", standing.detail)]
        rows += [("not seen", ", ".join(standing.unseen)), ("next step", standing.readiness.next_step)]
        print_fields([row for row in rows if row[1]])
    if not standing.is_ready:
        raise click.exceptions.Exit(1)


def _targets(options: dict[str, Any]) -> tuple[Target, ...]:
    from meshfusion.tools.mfctl.flash_targets import Target, read_targets

    places, path, service = options["places"], options["targets"], options["service"]
    if bool(places) == (path is not None):
        raise click.UsageError("Name either CARDs or --targets FILE.")
    if service and len(places) != 1:
        raise click.UsageError("--service is for one CARD; for more, name their services in --targets FILE.")
    if options["no_drain"] and service:
        raise click.UsageError("--no-drain and --service exclude each other.")
    if options["no_drain"] and not (options["yes"] or options["dry_run"]):
        raise click.UsageError("--no-drain needs --yes: engines lose what they have open.")
    if path is not None:
        return read_targets(path)
    if len({place.key for place in places}) != len(places):
        raise click.UsageError("A CARD is named twice.")
    return tuple(Target(place.text, place, service) for place in places)


def _bmc(options: dict[str, Any]) -> BmcAccess:
    import sys

    from meshfusion.dpu.image.edge.redfish import Credentials
    from meshfusion.tools.mfctl.flash_cards import BmcAccess

    def ask(host: str) -> Credentials:
        user = click.prompt(f"User of the BMC {host}", default="root", err=True)
        return Credentials(user, click.prompt("Password", hide_input=True, err=True))

    serve_at = options.get("serve_at", "")
    _, colon, port = serve_at.partition(":")
    if colon and not (port.isdecimal() and 0 < int(port) < 65_536):
        raise click.UsageError(f"--serve-at {serve_at!r}: write ADDRESS or ADDRESS:PORT.")
    return BmcAccess(
        options["bmc_credentials"], options["bmc_ca"], options["bmc_fingerprint"], options["bmc_ssh"],
        serve_at, ask if sys.stdin.isatty() else None,
    )  # fmt: skip
