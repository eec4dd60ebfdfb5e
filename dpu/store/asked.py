"""The chunks that requests asked for, remembered for a while: what they offer to be written later is judged by it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from meshfusion.jbof.policy.chain import Indexes, Keys

KEPT_CHUNKS = 1 << 20
"""Of all requests together, sixteen bytes each; the request asked longest ago goes first."""

CHAIN_CHUNKS = 32
"""A chain takes as much as so many chunks beside its own, also when it has none."""


def policy_keys(keys: Sequence[bytes]) -> Keys:
    """The first 64 bits of each, which are as uniform as the digests that keys are."""
    return np.frombuffer(b"".join(key[:8] for key in keys), np.uint64)


class ChainName(NamedTuple):
    holder_id: str
    request_id: str
    group: int


@dataclass(frozen=True, slots=True, eq=False)
class AskedChain:
    """Of one request and KV group: its chunks by their numbers from the request's start, ascending.

    ``refused_from``: the first that was not worth writing, if any. ``is_observed``: has the policy been told?
    """

    numbers: Indexes
    keys: Keys
    refused_from: int | None = None
    is_observed: bool = False

    def with_chunks(self, numbers: Indexes, keys: Keys) -> AskedChain:
        """With these, too; they count where another key was known for a number."""
        merged, at = np.unique(np.concatenate([numbers, self.numbers]), return_index=True)
        return replace(self, numbers=merged, keys=np.concatenate([keys, self.keys])[at])

    def places(self, numbers: Indexes) -> Indexes:
        """Where in the chain these numbers are, all of which it has."""
        places: Indexes = np.searchsorted(self.numbers, numbers)
        assert (self.numbers[places] == numbers).all(), (self.numbers, numbers)
        return places


NOTHING_ASKED = AskedChain(np.zeros(0, np.intp), np.zeros(0, np.uint64))


class AskedChains:
    """The latest ones, ``kept_chunks`` together at most, and one of any length. What was asked without a request's name
    is not remembered: it belongs to nothing that comes later."""

    def __init__(self, kept_chunks: int = KEPT_CHUNKS) -> None:
        self._kept_chunks = kept_chunks
        self._chunk_count = 0
        self._chains: OrderedDict[ChainName, AskedChain] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    def get(self, name: ChainName) -> AskedChain:
        return self._chains.get(name, NOTHING_ASKED)

    def put(self, name: ChainName, chain: AskedChain) -> None:
        self._drop(name)
        if not name.request_id:
            return
        self._chains[name] = chain
        self._chunk_count += len(chain.keys) + CHAIN_CHUNKS
        while self._chunk_count > self._kept_chunks and len(self._chains) > 1:
            self._drop(next(iter(self._chains)))

    def forget_holder(self, holder_id: str) -> None:
        for name in [name for name in self._chains if name.holder_id == holder_id]:
            self._drop(name)

    def _drop(self, name: ChainName) -> None:
        chain = self._chains.pop(name, None)
        if chain is not None:
            self._chunk_count -= len(chain.keys) + CHAIN_CHUNKS
