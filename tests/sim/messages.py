"""Requests on their way to the service: late, in any order, lost, sent again, and delivered twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.sim.host import Host
from tests.sim.service import Service

LOST = 0.02
SENT_AGAIN = 0.8  # of what was lost
TWICE = 0.05
DELAYED = 0.1
GOES_ON_LATE = 0.3
DELAYS_S = (1.0, 5.0)


@dataclass(frozen=True)
class Message:
    """``life``: the service's life it was meant for, None when any will do. ``kind``: what it asks for; "" for the rest
    of a request that has arrived already."""

    host: Host
    handle: Callable[[Service], None]
    kind: str
    life: int | None
    due_s: float


class Post:
    """Nothing is promised: a request may never arrive, or arrive twice, before or after any other."""

    def __init__(self, rng: random.Random, seen: Counter[str]) -> None:
        self._rng, self._seen = rng, seen
        self._messages: list[Message] = []

    def send(self, message: Message) -> None:
        """A request whose sender sends it again when it has no answer, sooner or later, or not at all."""
        rng = self._rng
        self._put(message, rng.choice(DELAYS_S) if rng.random() < DELAYED else 0.0)
        fate = rng.random()
        if fate < LOST:
            self._messages.pop()
            self._seen["requests lost"] += 1
            if rng.random() < SENT_AGAIN:
                self._put(message, rng.choice(DELAYS_S))
        elif fate < LOST + TWICE:
            self._put(message, rng.choice((0.0, *DELAYS_S)))
            self._seen[f"{message.kind} sent twice"] += 1

    def go_on(self, message: Message) -> None:
        """Nothing is lost, or doubled: the service does the rest of it later."""
        self._put(message, self._rng.choice(DELAYS_S) if self._rng.random() < GOES_ON_LATE else 0.0)

    def next_due(self, now_s: float) -> Message | None:
        due = [i for i, message in enumerate(self._messages) if message.due_s <= now_s]
        return self._messages.pop(self._rng.choice(due)) if due else None

    def lose_connections(self) -> None:
        """The service ended: what was bound to a connection with it may come to nothing."""
        self._messages = [m for m in self._messages if m.life is None or self._rng.random() < 0.5]

    def clear(self) -> None:
        self._messages.clear()

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def _put(self, message: Message, delay_s: float) -> None:
        self._messages.append(replace(message, due_s=message.due_s + delay_s))
