"""Carries out what an upgrade asks for on a fake card, over a connection that breaks, by a process that is killed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from meshfusion.dpu.image.errors import FaultKind
from meshfusion.dpu.image.slots.types import (
    Abort,
    Acted,
    Arm,
    Blob,
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
    Probed,
    Put,
    Switch,
    Unpack,
    Wait,
    Wanted,
)
from meshfusion.dpu.image.slots.upgrade import Upgrade
from tests.dpu.image.slots.fake_card import FakeCard, KilledError, PowerCutError
from tests.dpu.image.slots.twin import BusyError, DamagedError, RefusedError

MOST_EFFECTS = 20_000
CALL_S = 0.3
LOST_S = 15.0
"""After which ssh knows that a connection is gone."""


class CrashedError(Exception):
    """The upgrading process was killed."""


def wanted_of(digest: str, version: str, size_bytes: int = 20 << 20) -> Wanted:
    return Wanted(
        digest, version, Blob(digest, 500), Blob(f"config of {digest}", 900), (Blob(f"layer of {digest}", size_bytes),)
    )


@dataclass
class World:
    """``loss_rate``: of effects whose connection breaks, before or after. ``crash_rate``: at which the process dies.
    ``reboot_rate``: at which the card loses its power. ``damage_rate``: of what is put. ``is_full``: no space."""

    card: FakeCard
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    loss_rate: float = 0.0
    crash_rate: float = 0.0
    reboot_rate: float = 0.0
    damage_rate: float = 0.0
    is_full: bool = False
    interrupt_at: int | None = None
    crash_at: int | None = None
    cut_off_from: str = ""
    """The network goes for good with the first effect of this name."""
    is_cut_off: bool = False
    effects: list[Effect] = field(default_factory=list)

    def run(self, upgrade: Upgrade) -> Outcome:
        effect = upgrade.begin(self.card.now_s)
        for number in range(MOST_EFFECTS):
            if isinstance(effect, End):
                return effect.outcome
            self.effects.append(effect)
            if self.rng.random() < self.crash_rate or number == self.crash_at:
                if self.rng.random() < 0.5:
                    self._answer(effect)  # and nobody hears of it
                raise CrashedError
            event = self._answer(effect)
            if number == self.interrupt_at:
                upgrade.interrupt()
            effect = upgrade.next(event, self.card.now_s)
        raise AssertionError(f"no end after {MOST_EFFECTS} effects: {self.effects[-6:]}")

    def _answer(self, effect: Effect) -> Event:
        if isinstance(effect, Wait):
            self.card.advance(effect.until_s)
            return Acted()
        if self.rng.random() < self.reboot_rate:
            self.card.lose_power()
        self.card.advance(self.card.now_s + CALL_S)
        self.is_cut_off = self.is_cut_off or type(effect).__name__ == self.cut_off_from
        if not self.card.is_up or self.is_cut_off:
            return self._lost()
        is_lost = self.rng.random() < self.loss_rate
        if is_lost and self.rng.random() < 0.5:
            return self._lost()
        self.card.is_over_ssh = True
        try:
            event = self._carry_out(effect)
        except PowerCutError:
            self.card.lose_power()
            return self._lost()
        except KilledError:
            return self._lost()
        except BusyError:
            event = Faulted(FaultKind.BUSY, "busy", "wait")
        except RefusedError:
            event = Faulted(FaultKind.REFUSED, "refused", "none")
        except DamagedError:
            event = Faulted(FaultKind.DAMAGED, "damaged", "none")
        finally:
            self.card.is_over_ssh = False
        self.card.checked()
        return self._lost() if is_lost else event

    def _lost(self) -> Event:
        self.card.advance(self.card.now_s + LOST_S)
        return Faulted(FaultKind.UNREACHABLE, "the connection ended", "look at it")

    def _carry_out(self, effect: Effect) -> Event:
        twin = self.card.twin
        match effect:
            case Look():
                return Looked(twin.status())
            case Forget(names):
                twin.forget(*names)
            case Put(blob, offset, length):
                if self.is_full:
                    return Faulted(FaultKind.BROKEN, "No space left on device", "make room")
                is_damaged = self.rng.random() < self.damage_rate
                twin.put(blob.digest, offset, blob.size_bytes, length, is_damaged=is_damaged)
            case Unpack(slot, wanted):
                twin.unpack(slot, *(blob.digest for blob in wanted.blobs))
                self.card.is_over_ssh = False
                self.card.advance(self.card.now_s + 20.0)
            case Arm(slot, token, within_s, digest):
                twin.arm(slot, token, int(within_s), digest)
            case Drain():
                self.card.drain()
                self.card.is_over_ssh = False
                self.card.advance(self.card.now_s + 6.0)
            case Switch(token):
                twin.switch(token)
            case Probe():
                return self._probe()
            case Commit(token):
                was = twin.decided.committed
                twin.commit(token)
                if twin.decided.committed != was:
                    self.card.committed_digests.append(twin.slots[twin.decided.committed])
            case Abort(token, how):
                twin.abort(token, how)
            case _:
                raise AssertionError(effect)
        return Acted()

    def _probe(self) -> Probed:
        card, behaviour = self.card, self.card.behaviour
        if behaviour is None or card.started_s is None or card.now_s - card.started_s < behaviour.start_s:
            return Probed(is_ready=False, has_written=False, version="", reason="nobody answers")
        up_s = card.now_s - card.started_s
        is_ready = behaviour.ready_s <= up_s < behaviour.unready_s
        version = behaviour.tells or behaviour.version
        return Probed(is_ready=is_ready, has_written=is_ready, version=version, reason="" if is_ready else "not yet")
