"""Which tokens a token reads, from the definition of each kind of attention: the independent source for what a KV group
needs to be resumed."""

from __future__ import annotations

from meshfusion.host.kv.resume import LastWindow, LocalChunk, ResumeRule, StateAtBoundary, WholePrefix


def attended(rule: ResumeRule, token: int) -> set[int]:
    """The tokens before ``token`` whose KV it reads."""
    match rule:
        case WholePrefix():
            return set(range(token))
        case LastWindow(window):
            return {key for key in range(token) if token - key < window}
        case LocalChunk(stretch):
            return {key for key in range(token) if key // stretch == token // stretch}
        case StateAtBoundary():
            return {token - 1} if token else set()  # a state has no tokens: the block that ends here holds it
