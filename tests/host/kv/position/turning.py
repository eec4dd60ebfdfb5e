"""How far turned keys are from others, in the measure that turning keeps."""

from __future__ import annotations

import torch

from meshfusion.host.kv.position.form import PairStyle, RotaryForm


def random_keys(seed: int, tokens: int, form: RotaryForm, dtype: torch.dtype, heads: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, form.head_dim, generator=generator).to(dtype)


def rotary_pairs(keys: torch.Tensor, form: RotaryForm) -> torch.Tensor:
    """Complex float64, ``[tokens, heads, rotary_dim / 2]``."""
    rotary = keys[..., form.first_dim : form.first_dim + form.rotary_dim].double()
    if form.style is PairStyle.NEOX:
        first, second = rotary.chunk(2, dim=-1)
    else:
        first, second = rotary.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.complex(first, second)


def pair_errors(keys: torch.Tensor, expected: torch.Tensor, form: RotaryForm) -> torch.Tensor:
    """The distance of each pair from the expected one, in units of its length times the type's epsilon.

    Rounding both numbers of a pair once is at most 0.5 (an ulp of a number is at most epsilon times it).
    """
    wanted = rotary_pairs(expected, form)
    return (rotary_pairs(keys, form) - wanted).abs() / wanted.abs() / torch.finfo(expected.dtype).eps


def other_numbers(keys: torch.Tensor, form: RotaryForm) -> torch.Tensor:
    """Those of each key that its position does not touch."""
    return torch.cat((keys[..., : form.first_dim], keys[..., form.first_dim + form.rotary_dim :]), dim=-1)
