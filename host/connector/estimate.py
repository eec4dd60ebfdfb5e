"""Is loading faster than recomputing? A first estimate from measured rates (rule 8).

Rates are taken from what this engine did: bytes and seconds of finished loads, tokens and seconds of prefill steps.
Until both are known a load is assumed to be worth it, since that is how the first one gets measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

PREFILL_STEP_TOKENS_MIN = 64  # smaller steps are mostly overhead and decode
SAMPLES = 32
SAMPLES_MIN = 3  # fewer say nothing: one slow step or one cold read must not decide
REFUSALS_BETWEEN_PROBES = 16


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """``load_overhead_s``: lookup to first byte. ``abandon_factor``/``abandon_floor_s``: a load that runs over
    ``max(floor, factor * estimate)`` is abandoned. ``assumed_load_bytes_per_s``: before anything was measured."""

    load_overhead_s: float = 0.005
    abandon_factor: float = 2.0
    abandon_floor_s: float = 2.0
    assumed_load_bytes_per_s: float = 100e6


class _Rate:
    """The median of the last few samples: robust against one slow step or one cold read."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._median: float | None = None

    def observe(self, amount: int, seconds: float) -> None:
        self._samples.append(amount / seconds)
        self._median = None

    def per_s(self) -> float | None:
        """None while there are too few samples. Kept until the next one: the scheduler asks more often than that."""
        if self._median is None and len(self._samples) >= SAMPLES_MIN:
            self._median = statistics.median(self._samples)
        return self._median


class LoadEstimate:
    """What this engine's loads and prefill steps took, and what the next ones will."""

    def __init__(self, options: EstimateOptions) -> None:
        self._options = options
        self._load = _Rate()
        self._prefill = _Rate()
        self._refusals = 0

    def observe_load(self, load_bytes: int, seconds: float) -> None:
        if load_bytes > 0 and seconds > 0:
            self._load.observe(load_bytes, seconds)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step that computed ``tokens`` took ``seconds``."""
        if tokens >= PREFILL_STEP_TOKENS_MIN and seconds > 0:
            self._prefill.observe(tokens, seconds)

    def load_s(self, load_bytes: int) -> float:
        """Expected seconds to load ``load_bytes``."""
        rate = self._load.per_s() or self._options.assumed_load_bytes_per_s
        return self._options.load_overhead_s + load_bytes / rate

    def abandon_after_s(self, load_bytes: int) -> float:
        return max(self._options.abandon_floor_s, self._options.abandon_factor * self.load_s(load_bytes))

    def is_load_worth(self, tokens: int, load_bytes: int) -> bool:
        """Would loading ``load_bytes`` beat recomputing ``tokens``?

        Now and then a load is let through against the estimate: refused loads measure nothing, and a medium that was
        slow once would be held slow for ever.
        """
        prefill = self._prefill.per_s()
        if prefill is None or self._load.per_s() is None:
            return True
        if self.load_s(load_bytes) < tokens / prefill or self._refusals >= REFUSALS_BETWEEN_PROBES:
            self._refusals = 0
            return True
        self._refusals += 1
        return False
