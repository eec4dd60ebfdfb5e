"""What speaks against flashing a card, known before anything is done to it; and the steps of a flash. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshfusion.dpu.image import flash_words as words
from meshfusion.dpu.image.bfb import BfbSummary
from meshfusion.dpu.image.bundle import CARD_ARCHITECTURE, Bundle, SignatureState
from meshfusion.dpu.image.flash_types import Deadlines
from meshfusion.dpu.image.host_network import Isolation
from meshfusion.jbof.config_problems import ConfigProblem, as_fix


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Of one card; "" for what could not be found out.

    ``mode``: ``DPU mode``, ``NIC mode``, ``Unknown``, or "" where the card has but one. ``isolation``: None where its
    host cannot be looked at from here.
    """

    chip_family: str
    mode: str
    part_number: str = ""
    psid: str = ""
    is_dropped: bool = False
    is_locked: bool = False
    isolation: Isolation | None = None


@dataclass(frozen=True, slots=True)
class Consents:
    """What the operator takes upon himself. ``host_network``: that the host, or he, may be cut off."""

    host_network: bool = False


def image_problems(bundle: Bundle, bfb: BfbSummary) -> list[ConfigProblem]:
    """Of bundle and BFB, whatever card they are for."""
    manifest = bundle.manifest
    problems = []
    if bundle.signature is not SignatureState.VALID:
        fix = "sign it with mfctl image sign, or name the key that it is signed with by --key"
        problems.append(ConfigProblem("bundle signature", "cannot be relied on", fix, bundle.signature.value))
    if manifest.architecture != CARD_ARCHITECTURE:
        fix = f"take the bundle for {CARD_ARCHITECTURE}"
        problems.append(ConfigProblem("bundle architecture", "is not that of a DPU", fix, manifest.architecture))
    if manifest.bfb_sha256 and bfb.sha256 not in manifest.bfb_sha256:
        fix = f"take one with the SHA-256 {' or '.join(manifest.bfb_sha256)}"
        problems.append(ConfigProblem("BFB", "the bundle was made for another one", fix, bfb.sha256))
    return problems


def card_problems(card: CardFacts, bundle: Bundle, bfb: BfbSummary, consents: Consents) -> list[ConfigProblem]:
    """Of one card, with the image it is to get."""
    return [
        *_rshim_problems(card),
        *_chip_problems(card, bundle, bfb),
        *_identity_problems(card, bundle),
        *_network_problems(card, consents),
    ]


def _rshim_problems(card: CardFacts) -> Iterator[ConfigProblem]:
    if card.is_dropped:
        yield _worded("rshim", words.OWNED_ELSEWHERE)
    if card.is_locked:
        yield _worded("rshim", words.LOCKED)
    if card.mode == "NIC mode":
        yield _worded("card mode", words.NIC_MODE)
    elif card.mode not in ("", "DPU mode", "Unknown"):
        yield ConfigProblem("card mode", "is not DPU mode", "set the card to DPU mode", card.mode)


def _chip_problems(card: CardFacts, bundle: Bundle, bfb: BfbSummary) -> Iterator[ConfigProblem]:
    devices = bundle.manifest.devices
    chips = [] if devices is None else devices.chips
    if not card.chip_family:
        fix = "see that the rshim driver runs and can read the card's DEV_INFO"
        yield ConfigProblem("card chip", "cannot be told", fix)
        return
    if card.chip_family not in chips:
        fix = f"take a bundle for it; this one is for {', '.join(chips) or 'servers'}"
        yield ConfigProblem("card chip", "the bundle is not for it", fix, card.chip_family)
    if card.chip_family not in bfb.chip_families:
        made_for = ", ".join(sorted(bfb.chip_families)) or "no chip that is known"
        fix = f"take a BFB for it; this one has boot firmware for {made_for}"
        yield ConfigProblem("card chip", "the BFB is not for it", fix, card.chip_family)


def _identity_problems(card: CardFacts, bundle: Bundle) -> Iterator[ConfigProblem]:
    devices = bundle.manifest.devices
    if devices is None:
        return  # a server's, which is told already
    named = (("part number", card.part_number, devices.part_numbers), ("PSID", card.psid, devices.psids))
    for name, found, wanted in named:
        if wanted and found not in wanted:
            problem = "the bundle is not for it" if found else "cannot be told, and the bundle is for certain ones only"
            fix = f"take a bundle for it; this one is for {', '.join(wanted)}"
            yield ConfigProblem(f"card {name}", problem, fix, found or None)


def _network_problems(card: CardFacts, consents: Consents) -> Iterator[ConfigProblem]:
    if consents.host_network:
        return
    consent = "say --host-network-elsewhere if that is all right"
    if card.isolation is None:
        problem = "cannot be looked at from here, and the card may be all that connects it"
        yield ConfigProblem("host network", problem, consent)
    elif card.isolation.is_total:
        routes = ", ".join(card.isolation.default_routes)
        problem = "all its default routes go through the card, which goes away while it is flashed"
        yield ConfigProblem("host network", problem, f"give the host another way out, or {consent}", routes)
    elif card.isolation.operators:
        problem = "this session comes in through the card, which goes away while it is flashed"
        fix = f"log in over another interface, or {consent}"
        yield ConfigProblem("host network", problem, fix, ", ".join(card.isolation.operators))


def _worded(field: str, wording: tuple[str, str]) -> ConfigProblem:
    return ConfigProblem(field, wording[0], as_fix(wording[1]))


def steps(
    *, take: str, push: str, drain: str, total_bytes: int, deadlines: Deadlines
) -> tuple[tuple[str, str, float], ...]:
    """Phase, what is done in it, and its deadline in seconds. ``take``, ``push``, ``drain``: how, for this card."""
    return (
        ("draining", drain, deadlines.draining_s),
        ("preparing", f"{take}; look at its state once more; empty its log", deadlines.preparing_s),
        ("pushing", f"{push}: {total_bytes} bytes, BFB and bf.cfg; this resets the card", deadlines.pushing_s),
        ("installing", "follow its log until the installer is done; any failure in it counts", deadlines.installing_s),
        ("restarting", "wait until its Linux is up", deadlines.restarting_s),
        ("settling", "wait for tmfifo, ssh, the host's ports and matching versions", deadlines.settling_s),
    )
