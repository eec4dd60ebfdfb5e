"""One run: a trace, a policy by name, a size."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from meshfusion.jbof.policy.density_policy import LIFETIME_COUNT, DensityPolicy, PolicySettings
from meshfusion.jbof.policy.write_budget import WriteBudget
from meshfusion.jbof.sizes import parse_size_bytes
from meshfusion.tools.sim.classic import LIBRARY_POLICIES, simulate_classic
from meshfusion.tools.sim.figures import Figures
from meshfusion.tools.sim.pool import BlockMedium, Blocks, Medium, simulate
from meshfusion.tools.sim.segments import SegmentMedium
from meshfusion.tools.sim.trace import Trace

OURS = ("segments", "blocks")
POLICIES = (*OURS, "lru", "frequency-2", *LIBRARY_POLICIES, "clairvoyant")
DEFAULT_POLICIES = ("segments", "blocks", "lru", "frequency-2", "clairvoyant")


@dataclass(frozen=True, slots=True)
class SimSettings:
    """``bytes_per_token``: of KV, 128 KiB for an 8-billion-parameter model of 32 layers with 8 KV heads in 16 bits.

    ``policy``: None for those that fit the pool.
    """

    bytes_per_token: int = 131072
    segment_blocks: int = 32
    drive_writes_per_day: float | None = None
    policy: PolicySettings | None = None

    def bound_of(self, name: str) -> float | None:
        """The drive writes per day that a policy is held to; None: none, as the classic ones know no budget."""
        return self.drive_writes_per_day if name in OURS else None


def run_policy(
    trace: Trace, name: str, capacity_blocks: int, settings: SimSettings,
    progress: Callable[[int], None] = lambda done: None,
) -> Figures:  # fmt: skip
    """``name``: of :data:`POLICIES`. The budget of writes holds for ours only: the classic ones know none."""
    block_bytes = settings.bytes_per_token * trace.block_tokens
    if name not in OURS:
        return simulate_classic(trace, name, capacity_blocks, block_bytes, progress)
    blocks = Blocks(trace, policy_for(capacity_blocks, settings), block_bytes)
    medium: Medium = BlockMedium(trace, blocks, capacity_blocks)
    if name == "segments":
        medium = segment_medium(trace, blocks, capacity_blocks, settings)
    budget = None
    if settings.drive_writes_per_day is not None and trace.requests:
        budget = WriteBudget.of_drive(
            capacity_blocks * block_bytes, settings.drive_writes_per_day, trace.requests[0].time_s
        )
    return simulate(trace, blocks, medium, name, capacity_blocks, budget, progress)


def segment_medium(trace: Trace, blocks: Blocks, capacity_blocks: int, settings: SimSettings) -> SegmentMedium:
    # A small pool is cut into small segments: some must be full while others fill.
    segment_blocks = max(2, min(settings.segment_blocks, capacity_blocks // (4 * (LIFETIME_COUNT + 3))))
    segment_count = max(capacity_blocks // segment_blocks, LIFETIME_COUNT + 3)
    return SegmentMedium(trace, blocks, segment_count, segment_blocks, LIFETIME_COUNT)


def policy_for(capacity_blocks: int, settings: SimSettings) -> DensityPolicy:
    return DensityPolicy(settings.policy or PolicySettings.for_pool(capacity_blocks))


def size_blocks(text: str, trace: Trace, block_bytes: int) -> int:
    """``5%`` of the trace's different blocks, or as many blocks as fit into ``10GiB``.

    Raises ValueError with what to write instead.
    """
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    blocks = (
        int(trace.unique_blocks * float(share[1]) / 100) if share else parse_size_bytes(text.strip()) // block_bytes
    )
    if blocks < 1:
        raise ValueError(f"{text!r} is less than one block of {block_bytes} bytes; give a larger size")
    return blocks
