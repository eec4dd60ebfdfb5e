"""What a restart of the service costs: the policy forgets what it learned, the medium keeps what it holds."""

from __future__ import annotations

import enum

from meshfusion.tools.sim.figures import Figures
from meshfusion.tools.sim.pool import Blocks, simulate
from meshfusion.tools.sim.run import SimSettings, policy_for, segment_medium
from meshfusion.tools.sim.trace import Trace


class Restart(enum.Enum):
    NONE = "none"
    TOLD = "told"  # the new policy is told what is held
    UNTOLD = "untold"


def second_half(trace: Trace, capacity_blocks: int, settings: SimSettings, restart: Restart) -> Figures:
    """Figures of the requests after the restart, in the middle of the trace, on a medium of segments."""
    middle = len(trace.requests) // 2
    first, second = (
        Trace(trace.name, trace.block_tokens, requests, trace.unique_blocks)
        for requests in (trace.requests[:middle], trace.requests[middle:])
    )
    blocks = Blocks(trace, policy_for(capacity_blocks, settings), settings.bytes_per_token * trace.block_tokens)
    medium = segment_medium(trace, blocks, capacity_blocks, settings)
    simulate(first, blocks, medium, "before", capacity_blocks)
    if restart is not Restart.NONE:
        blocks.policy = policy_for(capacity_blocks, settings)
    if restart is Restart.TOLD:
        medium.tell_held(blocks.policy, second.requests[0].time_s)
    return simulate(second, blocks, medium, restart.value, capacity_blocks)
