"""What must be there of a KV group to resume at a boundary, and with that what is worth storing of a chunk.

Every kind of KV that can be reused says it with one number: to go on at token ``t``, the group's blocks from the one
that holds token ``first_token(t)`` up to ``t`` must hold what they held when ``t`` tokens had been computed. The number
never decreases with ``t``; the rest follows from it, see :class:`GroupPlan`.

Windows and chunks as the engine counts them: vLLM 0.32, v1/core/single_type_kv_cache_manager.py,
``get_num_skipped_tokens`` of the managers named below.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WholePrefix:
    """Every token attends to all before it (FullAttentionManager)."""

    def first_token(self, boundary_tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class LastWindow:
    """A token attends to itself and ``window_tokens - 1`` before it (SlidingWindowManager)."""

    window_tokens: int

    def __post_init__(self) -> None:
        assert self.window_tokens > 0, self.window_tokens

    def first_token(self, boundary_tokens: int) -> int:
        return max(0, boundary_tokens - self.window_tokens + 1)


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """A token attends to those before it in its own stretch of ``stretch_tokens`` (ChunkedLocalAttentionManager).

    The model calls a stretch an attention chunk; a chunk here is what is stored.
    """

    stretch_tokens: int

    def __post_init__(self) -> None:
        assert self.stretch_tokens > 0, self.stretch_tokens

    def first_token(self, boundary_tokens: int) -> int:
        return boundary_tokens // self.stretch_tokens * self.stretch_tokens


@dataclass(frozen=True, slots=True)
class StateAtBoundary:
    """One block holds the state after exactly ``boundary_tokens`` tokens, whatever led to it (MambaManager).

    It is the block of the last token before the boundary, and it exists only where the engine kept a snapshot.
    """

    def first_token(self, boundary_tokens: int) -> int:
        return max(0, boundary_tokens - 1)


ResumeRule = WholePrefix | LastWindow | LocalChunk | StateAtBoundary


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How one KV group is cut into chunks of ``chunk_tokens``, a multiple of its ``block_tokens``.

    Chunks are counted from the start of the request, boundaries in chunks: boundary ``n`` is after ``n`` of them.
    Blocks are counted likewise.
    """

    group: int
    rule: ResumeRule
    block_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        assert self.block_tokens > 0, self.block_tokens
        assert self.chunk_tokens > 0, self.chunk_tokens
        assert self.chunk_tokens % self.block_tokens == 0, (self.chunk_tokens, self.block_tokens)

    @property
    def is_snapshot(self) -> bool:
        """Are its blocks states, each of which exists only where the engine says that it kept one?"""
        return isinstance(self.rule, StateAtBoundary)

    @property
    def kept_blocks_max(self) -> int:
        """No chunk has more blocks that are stored."""
        per_chunk = self.chunk_tokens // self.block_tokens
        match self.rule:
            case LastWindow(window_tokens):
                return min(per_chunk, -(-(window_tokens - 1) // self.block_tokens))
            case StateAtBoundary():
                return 1
            case _:
                return per_chunk

    def needed_blocks(self, boundary: int) -> range:
        """The blocks that must be there to resume at ``boundary``."""
        return self.needed_blocks_at(boundary * self.chunk_tokens)

    def needed_blocks_at(self, boundary_tokens: int) -> range:
        """Likewise at a boundary of blocks."""
        assert boundary_tokens % self.block_tokens == 0, (boundary_tokens, self.block_tokens)
        first = self.rule.first_token(boundary_tokens) // self.block_tokens
        return range(first, boundary_tokens // self.block_tokens)

    def first_needed_chunk(self, boundary: int) -> int:
        """Chunks from this one up to ``boundary`` must be there; ``boundary`` itself when none must."""
        return self.needed_blocks(boundary).start * self.block_tokens // self.chunk_tokens

    def kept_blocks(self, chunk: int) -> range:
        """The blocks of ``chunk`` that some boundary after it needs: what is stored. The needs of the nearest one
        include those of all later ones, since ``first_token`` never decreases."""
        needed = self.needed_blocks(chunk + 1)
        return range(max(needed.start, chunk * self.chunk_tokens // self.block_tokens), needed.stop)
