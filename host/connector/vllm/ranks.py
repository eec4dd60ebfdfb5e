"""The workers of one engine, seen together: they must be alike in all but where their memory lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from meshfusion.host.connector.vllm.messages import WorkerFacts
from meshfusion.host.kv.identity import Identity, changed_facts
from meshfusion.jbof.errors import UnsupportedError

_ALIKE: Final = ("form", "hash_block_tokens", "block_count", "access")
_NAMED_MAX: Final = 8


def agreed_facts(by_rank: Mapping[int, object], rank_count: int) -> tuple[WorkerFacts, ...]:
    """What the workers have proven, in the order of their ranks; ``by_rank``: as the engine hands it on.

    Raises :class:`UnsupportedError` that names the rank which is missing or differs from rank 0, and in what.
    """
    facts = [fact for _, fact in sorted(by_rank.items()) if isinstance(fact, WorkerFacts)]
    if list(range(rank_count)) != sorted(by_rank) or len(facts) != rank_count:
        missing = [rank for rank in range(rank_count) if not isinstance(by_rank.get(rank), WorkerFacts)]
        raise UnsupportedError(
            f"of {rank_count} workers, ranks {missing} have not proven their layout, and {len(by_rank)} answered",
            next_step="see what these workers logged; or start the engine without this connector",
        )
    for rank, fact in enumerate(facts):
        differences = [f"it calls itself rank {fact.rank}"] if fact.rank != rank else []
        differences += _differences(facts[0], fact)
        if differences:
            raise UnsupportedError(
                f"the worker of rank {rank} is not like that of rank 0: {'; '.join(differences)}",
                next_step="start all ranks with the same software, model and environment, on the same kind of device",
            )
    return tuple(facts)


def _differences(first: WorkerFacts, other: WorkerFacts) -> Iterator[str]:
    if first.identity != other.identity:
        names = changed_facts(Identity(first.identity_json), Identity(other.identity_json))
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        yield f"its identity differs in {', '.join(names[:_NAMED_MAX]) or 'its digest'}{more}"
    for name in _ALIKE:
        mine, theirs = getattr(first, name), getattr(other, name)
        if mine != theirs:
            yield f"its {name} is {theirs!r}, not {mine!r}"
