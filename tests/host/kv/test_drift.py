"""How far two units are from each other: by numbers set by hand, for every dtype that is compared."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshfusion.host.kv.drift import U8, LayerNumbers, Numbers, drift_of, numbers_of
from meshfusion.jbof.errors import UnsupportedError


def raw(values: list[float], dtype: torch.dtype) -> U8:
    bits: U8 = torch.tensor(values).to(dtype).view(torch.uint8).numpy()
    return bits


def one_layer(dtype: torch.dtype, length_bytes: int) -> tuple[LayerNumbers, ...]:
    return (LayerNumbers("layer.0", (Numbers(dtype, length_bytes),)),)


@pytest.mark.parametrize(
    ("dtype", "floor"),
    [
        (torch.float32, 8 * 2**-10),
        (torch.float16, 8 * 2**-10),
        (torch.bfloat16, 8 * 2**-7),
        (torch.float8_e4m3fn, 8 * 2**-3),
        (torch.float8_e5m2, 8 * 2**-2),
    ],
)
def test_the_largest_difference_as_a_part_of_the_largest_number(dtype: torch.dtype, floor: float) -> None:
    one, other = raw([1.0, -4.0, 2.0, 0.5], dtype), raw([1.0, -4.0, 1.0, 0.75], dtype)
    found = drift_of(one, other, one_layer(dtype, one.size))
    assert found.difference == pytest.approx(0.25)
    assert (found.layer, found.floor) == ("layer.0", floor)
    assert drift_of(other, one, one_layer(dtype, one.size)).difference == found.difference


def test_the_layer_that_stands_out_is_named() -> None:
    numbers = tuple(LayerNumbers(f"layer.{i}", (Numbers(torch.float32, 8),)) for i in range(3))
    one, other = raw([1, 1, 1, 1, 1, 1], torch.float32), raw([1, 1, 1, 0.5, 1, 0.9], torch.float32)
    assert drift_of(one, other, numbers)[:2] == ("layer.1", 0.5)


def test_a_state_of_two_dtypes_is_judged_part_by_part() -> None:
    numbers = (LayerNumbers("state", (Numbers(torch.float32, 8), Numbers(torch.bfloat16, 4))),)
    one = np.concatenate([raw([1, 1], torch.float32), raw([100, 100], torch.bfloat16)])
    other = np.concatenate([raw([1, 0.98], torch.float32), raw([100, 99], torch.bfloat16)])
    found = drift_of(one, other, numbers)
    assert found.difference == pytest.approx(0.02), "0.01 of the other part is less, for a bfloat16 even more so"
    assert found.floor == 8 * 2**-10


def test_no_numbers_are_infinitely_far_from_any_but_their_own_bytes() -> None:
    numbers = one_layer(torch.float32, 8)
    for bad in (math.nan, math.inf):
        one, other = raw([1.0, bad], torch.float32), raw([1.0, 1.0], torch.float32)
        assert drift_of(one, other, numbers).difference == math.inf
        assert drift_of(other, one, numbers).difference == math.inf
        assert drift_of(one, one.copy(), numbers).difference == 0.0


def test_zeros_of_two_signs_are_equal() -> None:
    assert drift_of(raw([0.0], torch.float32), raw([-0.0], torch.float32), one_layer(torch.float32, 4)).difference == 0


def described(spec: Any, dtype: torch.dtype, page_bytes: int) -> Any:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
    layout: Any = SimpleNamespace(page_bytes=(page_bytes,))
    config = SimpleNamespace(kv_cache_groups=[group])
    return numbers_of(config, {"a": torch.empty(1, dtype=dtype)}, [layout])


def test_what_a_page_holds_comes_from_the_tensor_and_of_a_state_from_its_spec() -> None:
    assert described(SimpleNamespace(), torch.bfloat16, 64) == ((LayerNumbers("a", (Numbers(torch.bfloat16, 64),)),),)
    state = SimpleNamespace(shapes=((2, 3), (4,)), dtypes=(torch.float32, torch.bfloat16))
    parts = (Numbers(torch.float32, 24), Numbers(torch.bfloat16, 8))
    assert described(state, torch.int8, 32) == ((LayerNumbers("a", parts),),)


@pytest.mark.parametrize(
    ("spec", "dtype", "page_bytes"),
    [
        (SimpleNamespace(), torch.uint8, 64),
        (SimpleNamespace(shapes=((4,),), dtypes=(torch.int8,)), torch.int8, 4),
        (SimpleNamespace(shapes=((4,),), dtypes=(torch.float32,)), torch.int8, 20),
    ],
)
def test_what_is_not_known_to_be_numbers_is_refused(spec: Any, dtype: torch.dtype, page_bytes: int) -> None:
    with pytest.raises(UnsupportedError, match="audit: the KV of layer 'a'"):
        described(spec, dtype, page_bytes)
