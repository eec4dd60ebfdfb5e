"""How the keys of one layer carry their position, as values.

The numbers are those of a config; what follows from them is computed in :mod:`meshfusion.host.kv.position.turn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PairStyle(Enum):
    """Which two of the ``rotary_dim`` numbers of a head are turned together."""

    NEOX = "neox"
    """Number ``i`` with ``i + rotary_dim / 2``."""
    GPTJ = "gptj"
    """Number ``2 i`` with ``2 i + 1``."""


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Angle of pair ``i`` at position ``p``: ``p * base ** (-2 i / rotary_dim)``."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Positions are divided by ``factor``."""

    factor: float

    def __post_init__(self) -> None:
        assert self.factor > 0, self.factor


@dataclass(frozen=True, slots=True)
class Llama3:
    """Slow pairs are divided by ``factor``, fast ones are not, with a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        assert self.factor > 0, self.factor
        assert 0 < self.low_freq_factor <= self.high_freq_factor, self
        assert self.original_max_positions > 0, self.original_max_positions


@dataclass(frozen=True, slots=True)
class Yarn:
    """A ramp between dividing by ``factor`` and not, over the pairs' numbers (Peng et al., arXiv 2309.00071).

    ``magnitude``: what the engine multiplies cos and sin by. It is in the keys already, so turning does not apply it
    again.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    truncate: bool

    def __post_init__(self) -> None:
        assert self.factor > 0, self.factor
        assert self.original_max_positions > 0, self.original_max_positions
        assert self.beta_fast > 0, self.beta_fast
        assert self.beta_slow > 0, self.beta_slow
        assert self.magnitude > 0, self.magnitude


Scaling = Unscaled | Linear | Llama3 | Yarn


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """Of the ``head_dim`` numbers of a stored key, ``rotary_dim`` from ``first_dim`` on are turned by their position.

    The frequencies do not depend on the length of the request. Forms where they do (dynamic NTK, longrope) have no
    place here: the keys of one position then differ between requests, and there is no turn between them.
    """

    head_dim: int
    rotary_dim: int
    base: float
    style: PairStyle
    scaling: Scaling = Unscaled()
    first_dim: int = 0

    def __post_init__(self) -> None:
        assert self.rotary_dim > 0, self.rotary_dim
        assert self.rotary_dim % 2 == 0, self.rotary_dim
        assert 0 <= self.first_dim <= self.head_dim - self.rotary_dim, self
        assert self.base > 1, self.base


@dataclass(frozen=True, slots=True)
class PositionFree:
    """Keys that do not carry their position, so that those at p are those at q: layers without position (NoPE), and
    ALiBi, which adds the distance of query and key to the score."""

    head_dim: int


KeyPosition = RotaryForm | PositionFree
