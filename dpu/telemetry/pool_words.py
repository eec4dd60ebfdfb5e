"""What a pool is called in what people read."""

from __future__ import annotations


def called(pool: str) -> str:
    """``pool``: its name, "" for the only one of a service without ``pools``."""
    return f"pool {pool}" if pool else "the pool"


def named(pool: str, text: str) -> str:
    """The text, with the pool that it is of where there are several."""
    return f"pool {pool}: {text}" if pool else text
