"""What workers tell the scheduler's half when they have started, and what it makes of that: they must be alike in all
but where their memory lies, and one that is off turns off all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from meshfusion.host.connector.off_note import WhyOff
from meshfusion.host.connector.vllm.messages import WorkerFacts
from meshfusion.host.kv.identity import Identity, changed_facts

_ALIKE: Final = ("form", "hash_block_tokens", "block_count", "access")
_NAMED_MAX: Final = 8


@dataclass
class WorkerOff(KVConnectorHandshakeMetadata):
    """Instead of facts: it serves without the cache (on_unsupported), and why."""

    why: WhyOff
    reason: str
    next_step: str


def agreed_facts(by_rank: Mapping[int, object], rank_count: int) -> tuple[WorkerFacts, ...] | WorkerOff:
    """What the workers have proven, in the order of their ranks; or why none of them is served, which names the rank
    that is off, is missing, or differs from rank 0. ``by_rank``: as the engine hands it on."""
    off = {rank: told for rank, told in sorted(by_rank.items()) if isinstance(told, WorkerOff)}
    if off:
        return _why_off(off, rank_count)
    facts = [told for _, told in sorted(by_rank.items()) if isinstance(told, WorkerFacts)]
    if list(range(rank_count)) != sorted(by_rank) or len(facts) != rank_count:
        missing = [rank for rank in range(rank_count) if not isinstance(by_rank.get(rank), WorkerFacts)]
        return WorkerOff(
            WhyOff.WORKERS,
            f"of {rank_count} workers, ranks {missing} have not proven their layout, and {len(by_rank)} answered",
            "see what these workers logged; or start the engine without this connector",
        )
    for rank, fact in enumerate(facts):
        differences = [f"it calls itself rank {fact.rank}"] if fact.rank != rank else []
        differences += _differences(facts[0], fact)
        if differences:
            return WorkerOff(
                WhyOff.WORKERS,
                f"the worker of rank {rank} is not like that of rank 0: {'; '.join(differences)}",
                "start all ranks with the same software, model and environment, on the same kind of device",
            )
    return tuple(facts)


def _why_off(off: Mapping[int, WorkerOff], rank_count: int) -> WorkerOff:
    first = min(off)
    if rank_count == 1:
        return off[first]
    which = f"rank {first}" if len(off) == 1 else f"ranks {sorted(off)}, rank {first}"
    return WorkerOff(off[first].why, f"{which} of {rank_count}: {off[first].reason}", off[first].next_step)


def _differences(first: WorkerFacts, other: WorkerFacts) -> Iterator[str]:
    if first.identity != other.identity:
        names = changed_facts(Identity(first.identity_json), Identity(other.identity_json))
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        yield f"its identity differs in {', '.join(names[:_NAMED_MAX]) or 'its digest'}{more}"
    for name in _ALIKE:
        mine, theirs = getattr(first, name), getattr(other, name)
        if mine != theirs:
            yield f"its {name} is {theirs!r}, not {mine!r}"
