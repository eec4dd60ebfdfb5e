"""A request, and what it holds of the engine's blocks."""

from __future__ import annotations

import enum
from typing import Any

from tests.sim.connector.blocks import Block
from tests.sim.connector.shapes import Shape
from tests.sim.connector.texts import Value, block_hashes, values


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"  # reported, not scheduled since
    RUNNING = "running"
    ABORTED = "aborted"  # while it was loading: its blocks stay until that is reported
    ENDED = "ended"


class Request:
    """The fields that a connector reads have the engine's names. ``tables``: for each KV group the blocks from token 0
    on, the null block where there is none any more."""

    __slots__ = (
        "_hashes",
        "block_hashes",
        "is_load_failed",
        "last_tokens",
        "load_tokens",
        "local_tokens",
        "lora_request",
        "num_computed_tokens",
        "num_tokens",
        "prompt_tokens",
        "request_id",
        "shape",
        "skip_reading_prefix_cache",
        "skipped",
        "status",
        "tables",
        "text",
        "values",
    )

    def __init__(self, request_id: str, shape: Shape, text: str, prompt_tokens: int, last_tokens: int) -> None:
        self.request_id = request_id
        self.shape = shape
        self.text = text
        self.prompt_tokens = prompt_tokens
        self.last_tokens = last_tokens
        self.num_tokens = prompt_tokens
        self.num_computed_tokens = 0
        self.skip_reading_prefix_cache = False
        self.lora_request: Any = None
        self.status = Status.WAITING
        self.is_load_failed = False
        self.local_tokens = 0
        self.load_tokens = 0
        self.tables: list[list[Block]] = [[] for _ in shape.groups]
        self.skipped = [0] * len(shape.groups)
        self.values: tuple[tuple[tuple[Value, ...], ...], ...] = ()  # of each KV group, on each rank
        self._hashes = block_hashes(text, shape.hash_tokens)
        self.block_hashes: list[bytes] = list(self._hashes[: prompt_tokens // shape.hash_tokens])

    def begin_era(self, era: int) -> None:
        self.values = tuple(
            tuple(values(self.text, i, era, shard) for shard in self.shape.shards_by_rank(i))
            for i in range(len(self.shape.groups))
        )

    def append_token(self) -> None:
        self.num_tokens += 1
        if self.num_tokens % self.shape.hash_tokens == 0:
            self.block_hashes.append(self._hashes[self.num_tokens // self.shape.hash_tokens - 1])


class Table:
    """What the engine answers when asked for a request's blocks."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: list[list[Block]]) -> None:
        self.blocks = blocks
