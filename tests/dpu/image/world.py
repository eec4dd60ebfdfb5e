"""Carries out what a flash asks for on a fake card, in time that only the two of them spend."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from meshfusion.dpu.image.edge.faults import card_error
from meshfusion.dpu.image.errors import CardError, FaultKind
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
    PushEnded,
    PushMoved,
    ReadMisc,
    SetMisc,
    Snapshot,
    TakeRshim,
    Wait,
)
from meshfusion.dpu.image.misc import misc_command, parse_misc
from meshfusion.dpu.image.readiness import Observation
from meshfusion.dpu.image.stream import Stream
from tests.dpu.image.fake_card import BF_CFG, FakeCard, tiny_bfb

MOST_EFFECTS: Final = 100_000
ODD_FAULTS: Final = (FaultKind.GONE, FaultKind.UNREACHABLE, FaultKind.BROKEN)


class CrashedError(Exception):
    """The flashing process was killed."""


@dataclass
class World:
    """``fault_rate``: of effects that fail though the card is well. ``crash_rate``: of effects during which the process
    dies; what it had open is closed then. ``drains``: how often the service was asked to."""

    card: FakeCard
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    fault_rate: float = 0.0
    crash_rate: float = 0.0
    is_lost_after_push: bool = False
    """The process dies when the last byte is in the card, and knows nothing of it."""
    interrupt_at: int | None = None
    bfb: bytes = field(default_factory=tiny_bfb)
    drains: int = 0
    effects: list[Effect] = field(default_factory=list)
    kept: Snapshot | None = None
    _pieces: Iterator[bytes] | None = None
    _moved_bytes: int = 0

    @property
    def stream(self) -> Stream:
        return Stream(lambda: io.BytesIO(self.bfb), len(self.bfb), BF_CFG)

    def run(self, flash: Flash) -> Outcome:
        """Raises CrashedError with the flash half done, as it then is in ``kept``."""
        effect = flash.begin(self.card.now_s)
        for number in range(MOST_EFFECTS):
            if isinstance(effect, End):
                self.kept = flash.snapshot
                return effect.outcome
            self.effects.append(effect)
            self.kept = flash.snapshot
            self._perhaps_crash()
            if number == self.interrupt_at:
                flash.interrupt()
            effect = flash.next(self._answer(effect), self.card.now_s)
        raise AssertionError(f"no end after {MOST_EFFECTS} effects, in {flash.snapshot.phase}")

    def _perhaps_crash(self) -> None:
        if self.rng.random() < self.crash_rate:
            self._close()
            raise CrashedError

    def _answer(self, effect: Effect) -> Event:
        if not isinstance(effect, Wait) and self.rng.random() < self.fault_rate:
            if isinstance(effect, ContinuePush | AbandonPush):
                self._close()
            return Faulted(self.rng.choice(ODD_FAULTS), "injected", "none")
        try:
            event = self._carry_out(effect)
        except OSError as error:
            return _faulted(card_error(error, "the card"))
        self._perhaps_crash()
        if isinstance(event, PushEnded) and self.is_lost_after_push:
            self.is_lost_after_push = False
            raise CrashedError
        return event

    def _carry_out(self, effect: Effect) -> Event:
        match effect:
            case Drain():
                self.drains += 1
                return Drained()
            case SetMisc(key, value):
                self.card.write_misc(misc_command(key, value))
            case ReadMisc():
                return MiscRead(parse_misc(self.card.read_misc()))
            case BeginPush():
                self.card.open_boot()
                self._pieces, self._moved_bytes = self.stream.body(), 0
            case ContinuePush():
                return self._move()
            case AbandonPush():
                self._close()
            case Probe():
                return Probed(self._look())
            case Wait(until_s):
                self.card.now_s = max(self.card.now_s, until_s)
            case TakeRshim():
                pass
            case _:
                raise AssertionError(effect)
        return Acted()

    def _move(self) -> Event:
        assert self._pieces is not None
        piece = next(self._pieces, None)
        if piece is None:
            self.card.write_boot(self.stream.last_piece())
            self._close()
            return PushEnded()
        self._moved_bytes += self.card.write_boot(piece)
        return PushMoved(self._moved_bytes, self.stream.total_bytes)

    def _close(self) -> None:
        if self.card.is_boot_open:
            self.card.close_boot()
        self._pieces = None

    def _look(self) -> Observation:
        up_s, b = self.card.up_for_s(), self.card.behaviour
        return Observation(
            tmfifo_is_up=up_s >= b.tmfifo_s,
            ssh_banner="SSH-2.0-OpenSSH_8.9p1" if up_s >= b.ssh_s else "",
            unbound_ports=() if up_s >= b.ports_s else ("0000:83:00.0", "0000:83:00.1"),
            firmware_version="32.41.1000",
        )


def _faulted(error: CardError) -> Faulted:
    return Faulted(error.kind, error.message, error.next_step)
