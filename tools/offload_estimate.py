"""Does it pay to load a model's KV rather than to compute it again? Bytes over a link against operations on a device.

Recomputing a token is counted as two operations for each parameter it is multiplied with. Attention itself, whose cost
grows with the prompt, and the latency of a load are left out: the first speaks for loading, the second matters for
short prompts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshfusion.tools.model_kv import ModelKv

_MOST_TOKENS = 1 << 24
_OPERATIONS_PER_PARAMETER = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Assumed rates: of the link that KV is loaded over, and of the device that would compute."""

    link_bytes_per_s: float
    device_operations_per_s: float

    def __post_init__(self) -> None:
        assert self.link_bytes_per_s > 0, self.link_bytes_per_s
        assert self.device_operations_per_s > 0, self.device_operations_per_s


@dataclass(frozen=True, slots=True)
class Times:
    """For a prefix of ``tokens``: what must be loaded to resume after it, how long that takes, and computing it."""

    tokens: int
    load_bytes: int
    load_s: float
    recompute_s: float


def bytes_to_resume(model: ModelKv, tokens: int) -> int:
    """All groups together. Of a window or an attention chunk the most that any boundary needs."""
    total = 0.0
    for group in model.groups:
        for member in group.members:
            needed = min(tokens, member.limit_tokens) if member.limit_tokens else tokens
            total += member.bytes_per_token * needed + member.bytes_per_state
    return round(total)


def times(model: ModelKv, machine: Machine, tokens: int) -> Times:
    load_bytes = bytes_to_resume(model, tokens)
    operations = _OPERATIONS_PER_PARAMETER * model.active_parameters * tokens
    return Times(
        tokens, load_bytes, load_bytes / machine.link_bytes_per_s, operations / machine.device_operations_per_s
    )


def break_even_tokens(model: ModelKv, machine: Machine) -> int | None:
    """The shortest prefix that is loaded faster than it is computed; None: there is none.

    What is to be loaded grows ever slower with the prefix, the computing evenly: once ahead, loading stays ahead.
    """

    def loads_faster(tokens: int) -> bool:
        found = times(model, machine, tokens)
        return found.load_s < found.recompute_s

    if not loads_faster(_MOST_TOKENS):
        return None
    slower, faster = 0, _MOST_TOKENS
    while faster - slower > 1:
        middle = (slower + faster) // 2
        slower, faster = (slower, middle) if loads_faster(middle) else (middle, faster)
    return faster


def verdict(model: ModelKv, machine: Machine) -> tuple[bool, str]:
    """Does offloading pay, and why, in words and numbers."""
    if model.all_refusals:
        return False, (
            "nothing is offloaded: all groups that a boundary needs must be there, and this version does not serve "
            f"them ({len(model.all_refusals)} reason(s) above)"
        )
    tokens = break_even_tokens(model, machine)
    if tokens is None:
        return False, "loading KV takes longer than computing it again, however long the prefix: use a faster link"
    sample = times(model, machine, max(tokens, 8192))
    gain = sample.recompute_s / sample.load_s
    return True, (
        f"it pays from a shared prefix of {tokens} tokens on; at {sample.tokens} tokens loading takes "
        f"{sample.load_s * 1e3:.2f} ms, computing {sample.recompute_s * 1e3:.2f} ms ({gain:.1f} times as long)"
    )


def samples(model: ModelKv, machine: Machine, lengths: Sequence[int] = (1024, 8192, 65536)) -> tuple[Times, ...]:
    return tuple(times(model, machine, tokens) for tokens in lengths)
