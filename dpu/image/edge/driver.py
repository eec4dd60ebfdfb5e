"""Carries out what the flash of one card asks for, in real time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.dpu.image.edge.card import Card
from meshfusion.dpu.image.edge.journal_file import JournalFile
from meshfusion.dpu.image.errors import CardError
from meshfusion.dpu.image.flash import Flash
from meshfusion.dpu.image.flash_types import (
    AbandonPush,
    Acted,
    BeginPush,
    ContinuePush,
    Drain,
    Drained,
    Effect,
    End,
    Event,
    Faulted,
    MiscRead,
    Outcome,
    Probe,
    Probed,
    Progress,
    ReadMisc,
    SetMisc,
    Snapshot,
    TakeRshim,
    Wait,
)
from meshfusion.dpu.image.journal import Entry
from meshfusion.dpu.image.stream import Stream

log = logging.getLogger("meshfusion.flash")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """``drain``: within so many seconds; what the operator should know of it. ``stop``: set when the operator wants it
    to end. ``told``: how it stands, called often."""

    drain: Callable[[float], str]
    stop: threading.Event
    told: Callable[[Progress], None]
    now_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time


def run_flash(
    flash: Flash, card: Card, stream: Stream, journal: JournalFile, image: str, around: Surroundings
) -> Outcome:
    """To its end. ``image``: what the journal calls it. Raises OSError when the journal cannot be written, as long as
    nothing was done to the card; later that only costs a later run what it would know."""
    kept: Snapshot | None = None
    may_fail = True
    effect = flash.begin(around.now_s())
    while not isinstance(effect, End):
        if flash.snapshot != kept:
            kept = flash.snapshot
            _keep(journal, Entry(image, kept, around.wall_s()), may_fail=may_fail)
        may_fail = may_fail and not isinstance(effect, BeginPush)
        around.told(flash.progress)
        event = _answer(effect, card, stream, around)
        if around.stop.is_set():
            flash.interrupt()
        effect = flash.next(event, around.now_s())
    _keep(journal, Entry(image, flash.snapshot, around.wall_s()), may_fail=False)
    return effect.outcome


def _keep(journal: JournalFile, entry: Entry, *, may_fail: bool) -> None:
    try:
        journal.write(entry)
    except OSError as error:
        if may_fail:
            raise
        log.warning("the journal of the flash cannot be written: %s", error)


def _answer(effect: Effect, card: Card, stream: Stream, around: Surroundings) -> Event:
    try:
        return _carry_out(effect, card, stream, around)
    except CardError as error:
        return Faulted(error.kind, error.message, error.next_step)


def _carry_out(effect: Effect, card: Card, stream: Stream, around: Surroundings) -> Event:
    match effect:
        case Drain(within_s):
            return Drained(around.drain(within_s))
        case TakeRshim():
            card.rshim.take()
        case SetMisc(key, value):
            card.rshim.set_misc(key, value)
        case ReadMisc():
            return MiscRead(card.rshim.read_misc())
        case BeginPush():
            card.rshim.begin_push(stream)
        case ContinuePush():
            return card.rshim.continue_push()
        case AbandonPush():
            card.rshim.abandon_push()
        case Probe():
            return Probed(card.observe())
        case Wait(until_s):
            around.stop.wait(max(0.0, until_s - around.now_s()))
        case End():
            raise AssertionError("an end is nothing to carry out")
    return Acted()
