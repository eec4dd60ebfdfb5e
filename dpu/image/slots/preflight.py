"""What speaks against changing the service of a card, known before anything is done to it; and the steps. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.formats import Formats, differences
from meshfusion.dpu.image.bundle import SignatureState
from meshfusion.dpu.image.slots.card_state import CardState
from meshfusion.dpu.image.slots.service_image import ServiceImage
from meshfusion.dpu.image.slots.types import Deadlines, Wanted
from meshfusion.jbof.config_problems import ConfigProblem

SPARE_BYTES: Final = 64 << 20
"""Of the drive that holds the slots: what is left for everything else."""
_NO_WAY_BACK: Final = "say --no-way-back --yes if losing the pool's chunks on the way back is all right"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """``former``: formats of the committed slot, None where it does not tell or there is none. ``telemetry``: where its
    service tells whether it is ready, "" for nowhere; ``is_probed``: whether it looks."""

    state: CardState
    former: Formats | None
    telemetry: str
    is_probed: bool = True


def image_problems(image: ServiceImage) -> list[ConfigProblem]:
    """Of a bundle, whatever card it is for."""
    if image.bundle.signature is SignatureState.VALID:
        return []
    fix = "sign its manifest (docs/flash.md), or name the key that it is signed with by --key"
    return [ConfigProblem("bundle signature", "cannot be relied on", fix, image.bundle.signature.value)]


def upgrade_problems(card: CardFacts, image: ServiceImage, *, no_way_back: bool) -> list[ConfigProblem]:
    """Of one card, and the bundle that it is to get. None for one that has it already."""
    if card.state.committed_digest == image.wanted.digest:
        return []
    problems = [*_telemetry_problems(card), *_machine_problems(card, image), *_space_problems(card, image)]
    return [*problems, *_format_problems(card, image.formats, no_way_back=no_way_back)]


def rollback_problems(card: CardFacts, other: Formats | None, *, no_way_back: bool) -> list[ConfigProblem]:
    """Of going back to the slot that is not committed. ``other``: its formats."""
    state = card.state
    if state.trial is not None:
        return []
    if not state.committed:
        return [ConfigProblem("slots", "none is committed", "upgrade the card: mfctl dpu upgrade")]
    if not state.slots.get(state.spare):
        fix = "upgrade to the bundle that is wanted: mfctl dpu upgrade CARD --bundle FOLDER"
        return [ConfigProblem(f"slot {state.spare}", "holds nothing that could run", fix)]
    return [*_telemetry_problems(card), *_format_problems(card, other, no_way_back=no_way_back)]


def _telemetry_problems(card: CardFacts) -> Iterator[ConfigProblem]:
    if not card.telemetry:
        fix = "set it in /etc/meshfusion/service.yaml on the card, such as 127.0.0.1:9477"
        yield ConfigProblem("telemetry.listen", "is not set, so that nothing tells whether the service is ready", fix)
    elif card.telemetry.startswith("unix:"):
        fix = "use an address of the card, such as 127.0.0.1:9477"
        yield ConfigProblem("telemetry.listen", "cannot be reached through ssh", fix, card.telemetry)
    if not card.is_probed:
        fix = "remove it from /etc/meshfusion/service.yaml on the card"
        yield ConfigProblem("telemetry.probe", "is off, so that no chunk is written and read", fix, False)


def _machine_problems(card: CardFacts, image: ServiceImage) -> Iterator[ConfigProblem]:
    made_for = image.bundle.manifest.architecture
    if card.state.machine != made_for:
        fix = f"take the bundle for {card.state.machine}"
        yield ConfigProblem("bundle architecture", "is not that of the card", fix, made_for)


def _space_problems(card: CardFacts, image: ServiceImage) -> Iterator[ConfigProblem]:
    state, wanted = card.state, image.wanted
    if state.slots.get(state.spare) == wanted.digest:
        return
    there_bytes = sum(
        min(blob.size_bytes, max(state.blobs.get(blob.digest, 0), state.blobs.get(f"{blob.digest}.part", 0)))
        for blob in wanted.blobs
    )
    useless_bytes = sum(state.blobs.values()) - there_bytes
    needed_bytes = image.copied_bytes - there_bytes + image.unpacked_bytes + SPARE_BYTES
    given_bytes = state.free_bytes + useless_bytes + state.used_bytes.get(state.spare, 0)
    if needed_bytes > given_bytes:
        fix = f"free {needed_bytes - given_bytes} bytes more on the drive of /var/lib/meshfusion/slots"
        yield ConfigProblem("free space", f"is too little for {needed_bytes} bytes", fix, state.free_bytes)


def _format_problems(card: CardFacts, new: Formats | None, *, no_way_back: bool) -> Iterator[ConfigProblem]:
    """Of a pool that the former service has made. Without a former one there is nothing to lose."""
    if not card.state.committed:
        return
    if new is None or card.former is None:
        which = "the new" if new is None else "the committed"
        if not no_way_back:
            problem = f"cannot be told of {which} service, so that either may not open the pool of the other"
            yield ConfigProblem("formats", problem, _NO_WAY_BACK)
        return
    for found in differences(card.former, new):
        if found.blocks_forward:
            fix = "take a release that reads it (docs/upgrades.md), or give the service a new pool first"
            problem = f"the pool's version {found.former} cannot be read by {new.version}"
            yield ConfigProblem(f"format of the {found.what}", problem, fix, found.new)
        elif not no_way_back:
            problem = f"{card.former.version} could not read it afterwards, having version {found.former}"
            yield ConfigProblem(f"format of the {found.what}", problem, _NO_WAY_BACK, found.new)


def steps(
    state: CardState, wanted: Wanted, deadlines: Deadlines, *, drain: str, steady_s: float
) -> tuple[tuple[str, str, float], ...]:
    """Phase, what is done in it, and its deadline in seconds; of a card on which nothing is on trial."""
    if state.committed_digest == wanted.digest:
        return (("done", "is there already, and committed", 0.0),)
    spare = state.spare
    fill: tuple[tuple[str, str, float], ...] = ()
    if state.slots.get(spare) != wanted.digest:
        there = {name for blob in wanted.blobs for name in (blob.digest,) if state.blobs.get(name) == blob.size_bytes}
        left_bytes = sum(blob.size_bytes for blob in wanted.blobs if blob.digest not in there)
        fill = (
            ("copying", f"copy {left_bytes} bytes to the card and compare their digests", deadlines.copying_s),
            ("unpacking", f"empty slot {spare} and unpack into it", deadlines.unpacking_s),
        )
    back = f"slot {state.committed} comes back" if state.committed else "nothing runs again"
    return (
        *fill,
        ("draining", f"from here on {back} by itself after {deadlines.trial_s:g} s; {drain}", deadlines.draining_s),
        ("switching", f"stop the service, start that of slot {spare}", deadlines.switching_s),
        ("probing", f"until a chunk was written and read, and for {steady_s:g} s more", deadlines.probing_s),
        ("committing", f"slot {spare} is the one that comes back from then on", deadlines.committing_s),
    )
