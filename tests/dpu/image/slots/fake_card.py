"""A card with two slots, its systemd and its services, in time that only the test spends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from meshfusion.dpu.image.slots.card_state import ServiceRuns
from tests.dpu.image.slots.twin import RefusedError, Twin

BOOT_S = 40.0
RESTART_S = 2.0
BURST, BURST_S = 5, 600.0
FOREVER = 1e12


class PowerCutError(Exception):
    """The card lost its power in the middle of what it was at."""


class KilledError(Exception):
    """The script died with the connection that it was started over, and the card lives on."""


@dataclass(frozen=True)
class Behaviour:
    """Of the service in one bundle. Times are seconds after its start; FOREVER: never. ``ends_s``: when it ends by
    itself, ``is_restarted``: and systemd starts it again, as after a crash."""

    version: str
    start_s: float = 3.0
    ready_s: float = 8.0
    unready_s: float = FOREVER
    ends_s: float = FOREVER
    is_restarted: bool = True
    tells: str = ""
    stop_s: float = 4.0

    def is_good_for(self, seconds: float) -> bool:
        """Ready all of a time, once it was, and telling the truth."""
        is_up = min(self.unready_s, self.ends_s) >= self.ready_s + seconds
        return is_up and self.ready_s < FOREVER and self.start_s < FOREVER and not self.tells


@dataclass
class FakeCard:
    """``services``: by digest of the bundle. ``cut_rate``: of durable changes in which the power goes. ``kill_rate``:
    of those of a script that ``is_over_ssh`` in which that dies."""

    services: dict[str, Behaviour]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    cut_rate: float = 0.0
    kill_rate: float = 0.0
    is_over_ssh: bool = False
    has_deadman: bool = True
    now_s: float = 0.0
    up_since_s: float = 0.0
    boots: int = 0
    started_s: float | None = None  # the service's process
    stops_s: float = FOREVER  # when it will have stopped
    starts_s: float = FOREVER  # when systemd starts it
    is_failed: bool = False
    starts: list[float] = field(default_factory=list)
    deadman: tuple[float, str] | None = None
    checked: Callable[[], None] = lambda: None
    trials_started: list[str] = field(default_factory=list)
    committed_digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.twin = Twin(self, now_s=lambda: self.now_s - self.up_since_s, durable=self._durable)

    @property
    def is_up(self) -> bool:
        return self.now_s >= self.up_since_s + BOOT_S or self.boots == 0

    @property
    def behaviour(self) -> Behaviour | None:
        """Of the process that there is."""
        return self.services.get(self.twin.slots.get(self.twin.current, "")) if self.started_s is not None else None

    def install(self, slot: str, digest: str) -> None:
        """As an earlier upgrade left it, long ago."""
        self.twin.slots[slot] = digest
        self.twin.decided = type(self.twin.decided)(committed=slot)
        self._start()
        self.advance(self.now_s + 100.0)

    # What systemd is asked for.

    def restart(self) -> None:
        self.is_failed, self.starts = False, []
        if self.started_s is None:
            self.starts_s = self.now_s
        else:
            behaviour = self.behaviour
            self.starts_s = self.stops_s = self.now_s + (behaviour.stop_s if behaviour else 1.0)

    def stop(self) -> None:
        self.starts_s = FOREVER
        if self.started_s is not None:
            self.stops_s = min(self.stops_s, self.now_s + 4.0)

    def state(self) -> ServiceRuns:
        if self.started_s is not None and self.stops_s < FOREVER:
            return ServiceRuns.STOPPING
        if self.started_s is None:
            if self.starts_s < FOREVER:
                return ServiceRuns.STARTING
            return ServiceRuns.FAILED if self.is_failed else ServiceRuns.STOPPED
        behaviour = self.behaviour
        up_s = self.now_s - self.started_s
        return ServiceRuns.RUNNING if behaviour is not None and up_s >= behaviour.start_s else ServiceRuns.STARTING

    def arm(self, seconds: int, token: str) -> None:
        if self.has_deadman:
            self.deadman = (self.now_s + seconds, token)

    def disarm(self) -> None:
        self.deadman = None

    # What happens by itself.

    def drain(self) -> None:
        """As its own administration ends it: systemd leaves it down."""
        if self.started_s is not None:
            self.stops_s, self.starts_s = self.now_s + 4.0, FOREVER

    def lose_power(self) -> None:
        self.boots += 1
        self.twin.boot = f"boot-{self.boots}"
        self.up_since_s = self.now_s
        self.started_s, self.stops_s, self.is_failed, self.starts, self.deadman = None, FOREVER, False, [], None
        self.starts_s = self.now_s + BOOT_S

    def advance(self, until_s: float) -> None:
        while True:
            due_s, act = min(self._due(), key=lambda entry: entry[0])
            if due_s > until_s:
                break
            self.now_s = max(self.now_s, due_s)
            try:
                act()
            except PowerCutError:
                self.lose_power()
            self.checked()
        self.now_s = max(self.now_s, until_s)

    def _due(self) -> list[tuple[float, Callable[[], None]]]:
        found: list[tuple[float, Callable[[], None]]] = [(2 * FOREVER, lambda: None)]
        if self.deadman is not None:
            found.append((self.deadman[0], self._fire))
        if self.started_s is not None:
            found.append((self.stops_s, self._stopped))
            behaviour = self.behaviour
            if behaviour is not None:
                found.append((self.started_s + behaviour.ends_s, self._ended))
        else:
            found.append((self.starts_s, self._start))
        return found

    def _fire(self) -> None:
        assert self.deadman is not None
        token, self.deadman = self.deadman[1], None
        self.twin.expire(token)

    def _stopped(self) -> None:
        self.started_s, self.stops_s = None, FOREVER

    def _ended(self) -> None:
        behaviour = self.behaviour
        assert behaviour is not None
        self.started_s = None
        if self.stops_s < FOREVER:
            self.stops_s = FOREVER
        elif behaviour.is_restarted:
            self._again()

    def _again(self) -> None:
        self.starts = [start_s for start_s in self.starts if self.now_s - start_s < BURST_S]
        self.is_failed = len(self.starts) >= BURST
        self.starts_s = FOREVER if self.is_failed else self.now_s + RESTART_S

    def _start(self) -> None:
        assert self.started_s is None, "two services at once"
        self.starts_s = FOREVER
        self.starts.append(self.now_s)
        try:
            slot = self.twin.pick()
        except RefusedError:
            self._again()
            return
        if slot == self.twin.decided.trial:
            self.trials_started.append(self.twin.decided.token)
        self.started_s = self.now_s

    def _durable(self) -> None:
        self.checked()
        if self.rng.random() < self.cut_rate:
            raise PowerCutError
        if self.is_over_ssh and self.rng.random() < self.kill_rate:
            raise KilledError
