"""A trace instead of assumptions: what the pool's own policy makes of it, at a size (:mod:`meshfusion.tools.sim`).

A trace has a pace of its own. More requests a second are taken for so many such streams side by side, which share
nothing: a pool for ``n`` of them serves each as an ``n``-th of it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.sim.figures import Figures
from meshfusion.tools.sim.run import SimSettings, run_policy
from meshfusion.tools.sim.trace import Trace

POLICY: Final = "segments"
LADDER: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Sizes that are tried for a wanted share of hits, as multiples of the trace's different blocks. Above 1 too, since a
pool for all of them needs some room to work in."""


@dataclass(frozen=True, slots=True)
class Replay:
    """``hit_ratio``: of prompt tokens, those that an engine can load. ``needed_bytes``: on the medium, for all streams;
    None where the size was given. ``requests_per_s``: None where it was given. The others as in
    :data:`~meshfusion.tools.plan.given.GIVEN`."""

    requests_per_s: float | None
    prompt_tokens: float
    hit_ratio: float
    written_share: float
    rewrite_share: float
    needed_bytes: float | None

    def given(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Streams:
    """``trace`` at ``requests_per_s``; None: at its own pace. ``bytes_per_token``: on the medium."""

    trace: Trace
    requests_per_s: float | None
    bytes_per_token: float

    @property
    def rate(self) -> float:
        return self.requests_per_s if self.requests_per_s is not None else self._own_rate

    @property
    def _own_rate(self) -> float:
        return len(self.trace.requests) / self.trace.duration_s

    @property
    def _bytes_per_block(self) -> float:
        """For all streams."""
        return self.bytes_per_token * self.trace.block_tokens * self.rate / self._own_rate

    def blocks_in(self, usable_bytes: float) -> int:
        """Of one stream, in a pool for all."""
        return int(usable_bytes / self._bytes_per_block)

    def bytes_for(self, blocks: int) -> float:
        return blocks * self._bytes_per_block


def check_trace(trace: Trace) -> None:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` for a trace that has no pace."""
    if not trace.accesses or not trace.duration_s:
        raise ConfigError(
            f"--trace: {trace.name} has {len(trace.requests)} requests in {trace.duration_s:g} s, too few for a rate",
            next_step="Give a trace of some hours.",
        )


def replay_at(streams: Streams, usable_bytes: float, progress: Callable[[int], None] = lambda done: None) -> Replay:
    """What a pool with this room makes of the streams."""
    blocks = streams.blocks_in(usable_bytes)
    if blocks < 1:
        raise ConfigError(
            "--drives: a pool of this size has no room for one block of each stream of the trace",
            next_step="Give more or larger drives, or fewer --requests.",
        )
    return _replay(streams, _run(streams, blocks, progress), None)


def replay_for(streams: Streams, hit_ratio: float, progress: Callable[[int], None] = lambda done: None) -> Replay:
    """The smallest pool of :data:`LADDER` that has at least this share of hits.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` where none has.
    """
    best = 0.0
    for share in LADDER:
        blocks = max(1, round(streams.trace.unique_blocks * share))
        figures = _run(streams, blocks, progress)
        if figures.token_hit_ratio >= hit_ratio:
            return _replay(streams, figures, streams.bytes_for(blocks))
        best = max(best, figures.token_hit_ratio)
    raise ConfigError(
        f"--hit-ratio: {hit_ratio:g} of the tokens of {streams.trace.name} are not to be had at any size; the most "
        f"that was found is {best:.3f}",
        next_step=f"Ask for {best * 0.99:.2f} or less.",
    )


def _run(streams: Streams, blocks: int, progress: Callable[[int], None]) -> Figures:
    settings = SimSettings(bytes_per_token=max(1, round(streams.bytes_per_token)))
    return run_policy(streams.trace, POLICY, blocks, settings, progress)


def _replay(streams: Streams, figures: Figures, needed_bytes: float | None) -> Replay:
    computed_tokens = figures.input_tokens - figures.usable_hit_tokens
    saved_tokens = figures.admitted * streams.trace.block_tokens
    return Replay(
        requests_per_s=streams.rate if streams.requests_per_s is None else None,
        prompt_tokens=figures.input_tokens / len(streams.trace.requests),
        hit_ratio=figures.token_hit_ratio,
        # The last block of a prompt counts whole where it is saved, and by its tokens where it is computed.
        written_share=min(1.0, saved_tokens / computed_tokens) if computed_tokens else 0.0,
        rewrite_share=figures.rewritten / figures.admitted if figures.admitted else 0.0,
        needed_bytes=needed_bytes,
    )
