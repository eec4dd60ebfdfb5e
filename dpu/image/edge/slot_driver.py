"""Carries out what the upgrade of one card asks for, in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.dpu.image.edge.slot_card import SlotCard
from meshfusion.dpu.image.errors import CardError
from meshfusion.dpu.image.slots.types import (
    Abort,
    Acted,
    Arm,
    Commit,
    Drain,
    Effect,
    End,
    Event,
    Faulted,
    Forget,
    Look,
    Looked,
    Outcome,
    Probe,
    Progress,
    Put,
    Switch,
    Unpack,
    Wait,
)
from meshfusion.dpu.image.slots.upgrade import Upgrade


@dataclass(frozen=True, slots=True)
class SlotSurroundings:
    """``drain``: within so many seconds; what the operator should know of it. Raises CardError. ``stop``: set when the
    operator wants it to end. ``told``: how it stands, called often."""

    drain: Callable[[float], str]
    stop: threading.Event
    told: Callable[[Progress], None]
    now_s: Callable[[], float] = time.monotonic


def run_upgrade(upgrade: Upgrade, card: SlotCard, around: SlotSurroundings) -> Outcome:
    """To its end."""
    effect = upgrade.begin(around.now_s())
    was_told = False
    while not isinstance(effect, End):
        around.told(upgrade.progress)
        event = _answer(effect, card, around, may_wait=not was_told)
        if around.stop.is_set() and not was_told:
            upgrade.interrupt()
            was_told = True  # what follows is the way back, which takes its time
        effect = upgrade.next(event, around.now_s())
    return effect.outcome


def _answer(effect: Effect, card: SlotCard, around: SlotSurroundings, *, may_wait: bool) -> Event:
    try:
        return _carry_out(effect, card, around, is_interruptible=may_wait)
    except CardError as error:
        return Faulted(error.kind, error.message, error.next_step)


def _carry_out(effect: Effect, card: SlotCard, around: SlotSurroundings, *, is_interruptible: bool) -> Event:
    match effect:
        case Look():
            return Looked(card.look())
        case Probe():
            return card.probe()
        case Forget(names):
            card.forget(names)
        case Put(blob, offset_bytes, length_bytes):
            card.put(blob, offset_bytes, length_bytes)
        case Unpack(slot, wanted):
            card.unpack(slot, wanted)
        case Arm(slot, token, within_s, digest):
            card.arm(slot, token, within_s, digest)
        case Drain(within_s):
            return Acted(around.drain(within_s))
        case Switch(token):
            card.switch(token)
        case Commit(token):
            card.commit(token)
        case Abort(token, how):
            card.abort(token, how)
        case Wait(until_s):
            wait_s = max(0.0, until_s - around.now_s())
            if is_interruptible:
                around.stop.wait(wait_s)
            else:
                time.sleep(wait_s)
        case End():
            raise AssertionError("an end is nothing to carry out")
    return Acted()
