"""What the keys of a pool stand for, known beforehand: every chunk of every text."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from meshfusion.host.kv.identity import chunk_key
from tests.sim.connector.shapes import Kind, Shape
from tests.sim.connector.texts import TEXT_TOKENS, TEXTS, Value, values

Content = tuple[Value, ...]
"""Of one unit: a block, or a state."""


class Name(NamedTuple):
    """Chunk ``number`` of a KV group; ``text`` up to its end."""

    group: int
    number: int
    text: str


class Names(NamedTuple):
    of_key: dict[bytes, Name]
    key_of: dict[Name, bytes]
    of_text: dict[str, list[Name]]


@lru_cache(maxsize=64)
def names_under(identity: bytes, shape: Shape) -> Names:
    key_of = {}
    of_text: dict[str, list[Name]] = {}
    for text in TEXTS:
        for index in range(TEXT_TOKENS // shape.chunk_tokens):
            prefix = text[: (index + 1) * shape.chunk_tokens]
            for group in range(len(shape.groups)):
                key = chunk_key(identity, group, b"", index * shape.chunk_tokens, prefix.encode())
                name = Name(group, index, prefix)
                key_of[name] = key
                of_text.setdefault(text, []).append(name)
    return Names({key: name for name, key in key_of.items()}, key_of, of_text)


@cache
def contents(shape: Shape, name: Name, era: int, unit_count: int, shard: int) -> tuple[Content, ...]:
    """What the last ``unit_count`` blocks of a chunk hold on the ranks of ``shard``."""
    group = shape.groups[name.group]
    wanted = values(name.text, name.group, era, shard)
    if group.kind is Kind.STATE:
        assert unit_count <= 1, name
        return ((wanted[-1],),) * unit_count
    size, end = group.block_tokens, len(name.text)
    return tuple(wanted[i : i + size] for i in range(end - unit_count * size, end, size))
