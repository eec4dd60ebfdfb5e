"""Turn keys from the positions they were made for to others.

A rotary layer stores, of each pair of numbers taken as a complex one, ``k * z(p)``, where ``z(p)`` is ``cos + i sin``
of the pair's angle at position p. Its keys at q are ``k * z(q)``, and that is the stored one times ``z(q) / z(p)``.

``z`` is taken as the engine has it, rounding included, and not from q - p: an engine multiplies positions and
frequencies in float32, where at position 1,000,000 an angle is up to 0.03 off, and rounds cos and sin to the type of
the keys. Both are then the same here as where the keys were made. A factor on cos and sin (YaRN) is in both ``z`` and
cancels.

Formulas, and the order of operations: vLLM 0.32, model_executor/layers/rotary_embedding (``base.py``,
``linear_scaling_rope.py``, ``llama3_rope.py``, ``yarn_scaling_rope.py`` and ``common.py``).
"""

from __future__ import annotations

import math

import torch

from meshfusion.host.kv.position.form import KeyPosition, Linear, Llama3, PairStyle, PositionFree, RotaryForm, Yarn
from meshfusion.jbof.errors import UnsupportedError

KEY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POSITION_LIMIT = 2**24
"""Engines take positions as float32, which tells whole numbers apart up to here."""


def turn_keys(
    keys: torch.Tensor,
    position: KeyPosition,
    from_positions: torch.Tensor,
    to_positions: torch.Tensor,
    *,
    cos_sin_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The keys that the layer would have at ``to_positions``, from those it stored for ``from_positions``.

    True only for a layer whose inputs are equal at both. Those of the first are: the tokens' embeddings. Keys (and
    values) of deeper layers depend on all tokens before them: turned, they are those of a request with the other past,
    and nothing here can tell. How equal, and when it means anything: docs/position.md.

    Args:
        keys: ``[tokens, heads, head_dim]``, as stored: turned already, and after any norm.
        position: how this layer's keys carry their position.
        from_positions, to_positions: ``[tokens]``, integers of [0, 2**24).
        cos_sin_dtype: the type in which the engine keeps cos and sin; None: that of the keys, as vLLM does.

    Returns: a new tensor like ``keys``. Numbers that are not turned, and keys that stay where they are, are the same
    bits.

    Raises:
        UnsupportedError: keys of a type that cannot be turned.
    """
    _check_dtype(keys.dtype)
    assert keys.ndim == 3, keys.shape
    assert keys.shape[2] == position.head_dim, (keys.shape, position)
    _check_positions(from_positions, keys)
    _check_positions(to_positions, keys)
    turned = keys.clone()
    if isinstance(position, PositionFree):
        return turned
    table_dtype = cos_sin_dtype or keys.dtype
    before = cos_sin(position, from_positions.to(keys.device), table_dtype)
    after = cos_sin(position, to_positions.to(keys.device), table_dtype)
    real, imaginary = _pairs(turned, position)
    x, y = real.double(), imaginary.double()
    cos, sin = (part.unsqueeze(1) for part in _quotient(after, before))  # the same for all heads
    real.copy_(x * cos - y * sin)
    imaginary.copy_(y * cos + x * sin)
    return turned


def cos_sin(form: RotaryForm, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's cos and sin, each ``[tokens, rotary_dim / 2]``, with its factor on them and rounded to ``dtype``."""
    scaling = form.scaling
    places = positions.to(torch.float32)
    if isinstance(scaling, Linear):
        places = places / scaling.factor
    angles = places[:, None] * inverse_frequencies(form, device=positions.device)[None, :]
    cos, sin = angles.cos(), angles.sin()
    if isinstance(scaling, Yarn):
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return cos.to(dtype), sin.to(dtype)


def inverse_frequencies(form: RotaryForm, *, device: torch.device | None = None) -> torch.Tensor:
    """Radians a position (divided by the factor, if linear) for each pair, float32 ``[rotary_dim / 2]``."""
    exponents = torch.arange(0, form.rotary_dim, 2, dtype=torch.float32, device=device) / form.rotary_dim
    pair_base = form.base**exponents
    match form.scaling:
        case Llama3() as scaling:
            return _llama3(1.0 / pair_base, scaling)
        case Yarn() as scaling:
            return _yarn(pair_base, form, scaling)
        case _:
            return 1.0 / pair_base


def _llama3(plain: torch.Tensor, scaling: Llama3) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    ramp = (scaling.original_max_positions / wavelengths - low) / (high - low) if low != high else 0.0
    between = (1 - ramp) * plain / scaling.factor + ramp * plain
    slow = wavelengths > scaling.original_max_positions / low
    fast = wavelengths < scaling.original_max_positions / high
    return torch.where(fast, plain, torch.where(slow, plain / scaling.factor, between))


def _yarn(pair_base: torch.Tensor, form: RotaryForm, scaling: Yarn) -> torch.Tensor:
    def pair_that_turns(rotations: float) -> float:
        """The number (of dimensions, two a pair as the paper has it) that turns so often within the original length."""
        lengths = scaling.original_max_positions / (rotations * 2 * math.pi)
        return form.rotary_dim * math.log(lengths) / (2 * math.log(form.base))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, form.rotary_dim - 1)
    if low == high:
        high += 0.001  # the engine's way around a division by zero
    pairs = torch.arange(form.rotary_dim // 2, dtype=torch.float32, device=pair_base.device)
    unscaled_part = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * pair_base) * (1 - unscaled_part) + 1.0 / pair_base * unscaled_part


def _pairs(keys: torch.Tensor, form: RotaryForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second numbers of all pairs, ``[tokens, heads, rotary_dim / 2]``."""
    rotary = keys[..., form.first_dim : form.first_dim + form.rotary_dim]
    if form.style is PairStyle.NEOX:
        half = form.rotary_dim // 2
        return rotary[..., :half], rotary[..., half:]
    return rotary[..., ::2], rotary[..., 1::2]


def _quotient(
    after: tuple[torch.Tensor, torch.Tensor], before: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``after / before`` as complex numbers, in float64. Of equal ones exactly (1, 0)."""
    c, s = (part.double() for part in after)
    a, b = (part.double() for part in before)
    square = a * a + b * b
    return (c * a + s * b) / square, (s * a - c * b) / square


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype in KEY_DTYPES:
        return
    raise UnsupportedError(
        f"keys of type {dtype} cannot be turned: quantised keys would be rounded to their coarse steps once more, with "
        "scales that were chosen for other numbers",
        next_step="recompute the keys at the other position, or store them as bfloat16, float16 or float32",
    )


def _check_positions(positions: torch.Tensor, keys: torch.Tensor) -> None:
    assert positions.shape == keys.shape[:1], (positions.shape, keys.shape)
    assert not positions.dtype.is_floating_point, positions.dtype
    if positions.numel():
        lowest, highest = (int(end) for end in positions.aminmax())
        assert 0 <= lowest <= highest < POSITION_LIMIT, (lowest, highest)
