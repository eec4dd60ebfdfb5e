"""Which ranks of a tensor-parallel engine hold the same bytes of a KV group: those share one shard.

Only what the engine says of a layer counts; where it says nothing, every rank has a shard of its own, which is right
whatever it holds. Source: vLLM 0.32, ``_layer_tp_replicas`` of v1/core/kv_cache_utils.py ("consecutive TP ranks holding
identical KV") and ``MambaSpec.tp_replicated`` of v1/kv_cache_interface.py. Older versions say less.
"""

from __future__ import annotations

import math
from typing import Any

from meshfusion.host.kv.classify import kind_of, member_specs
from meshfusion.host.kv.kinds import RECURRENT_STATE


def ranks_per_shard(spec: Any, rank_count: int) -> int:
    """How many ranks, next to each other, hold the same bytes of a group with this spec, of one layer or a container.

    A divisor of ``rank_count``.
    """
    return math.gcd(rank_count, *(_of_layer(member, rank_count) for member in member_specs(spec)))


def _of_layer(spec: Any, rank_count: int) -> int:
    if kind_of(spec) is RECURRENT_STATE:
        return rank_count if getattr(spec, "tp_replicated", False) is True else 1
    shards = getattr(spec, "max_tp_shards", None)
    if not isinstance(shards, int) or shards < 1 or rank_count % shards:
        return 1
    return rank_count // shards
