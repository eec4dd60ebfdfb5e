"""A curator that decides at random: whatever a policy answers, the store keeps its rules."""

from __future__ import annotations

import random
from collections.abc import Sequence

from meshfusion.dpu.api import types as api
from meshfusion.dpu.store.curator import Offer, Scarcity, WritesEverything
from meshfusion.dpu.store.segments import Segments

REFUSAL_RATE = 0.1


class Whims(WritesEverything):
    def __init__(self, rng: random.Random, refusal_rate: float, segments: Segments, numbers: Sequence[int]) -> None:
        self._rng = rng
        self._segments = segments
        self._numbers = numbers
        self.refusal_rate = refusal_rate

    def admit(
        self, now_s: float, holder_id: str, identity: bytes, offers: Sequence[Offer], scarcity: Scarcity
    ) -> list[int | None]:
        return [None if self._rng.random() < self.refusal_rate else 0 for _ in offers]

    def worth_keeping(
        self, now_s: float, chunks: Sequence[api.ChunkRecord], allowed_bytes: int
    ) -> list[api.ChunkRecord]:
        return [chunk for chunk in chunks if self._rng.random() < 0.5]

    def tend(self, now_s: float, allowed_bytes: int) -> bool:
        for segment in self._numbers:
            if self._rng.random() < 0.5:
                self._segments.valued(segment, self._rng.random())
        return False
