from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.tools.model_kv import GroupKv, LayerKv, ModelKv
from meshfusion.tools.offload_estimate import Machine, break_even_tokens, bytes_to_resume, samples, times, verdict

FULL = LayerKv("FullAttentionSpec", "full_attention", 2, "a", "every block", 16, 1600, 2048, 0, False)
WINDOW = replace(FULL, spec_class="SlidingWindowSpec", kind="sliding_window", limit_tokens=500)
STATE = LayerKv("MambaSpec", "recurrent_state", 3, "b", "the state", 256, 1_000_000, 1 << 20, 0, True)
MACHINE = Machine(link_bytes_per_s=1e9, device_operations_per_s=1e12)


def model(*members: LayerKv, active: int = 1_000_000, refusals: tuple[str, ...] = ()) -> ModelKv:
    return ModelKv("0.32.0", "cpu", tuple(GroupKv((m,), ()) for m in members), active, active, refusals, 1.0)


def test_bytes_by_hand() -> None:
    """200 bytes a token in two layers; of the window 500 tokens at most; three states of a million."""
    assert bytes_to_resume(model(FULL), 1000) == 200_000
    assert bytes_to_resume(model(WINDOW), 100) == 20_000
    assert bytes_to_resume(model(WINDOW), 1000) == 100_000
    assert bytes_to_resume(model(STATE), 1) == 3_000_000
    assert bytes_to_resume(model(FULL, WINDOW, STATE), 1000) == 3_300_000


def test_times_by_hand() -> None:
    found = times(model(FULL), MACHINE, 1000)
    assert found.load_s == pytest.approx(0.0002)
    assert found.recompute_s == pytest.approx(0.002)
    assert [sample.tokens for sample in samples(model(FULL), MACHINE)] == [1024, 8192, 65536]


def test_break_even_by_hand() -> None:
    """A token costs 2 us to compute and 0.2 us to load; a state of 3 ms is made up for after 3000 / 1.8 tokens."""
    assert break_even_tokens(model(FULL), MACHINE) == 1
    assert break_even_tokens(model(FULL, STATE), MACHINE) == 1667
    assert break_even_tokens(model(FULL, active=50_000), MACHINE) is None


@given(
    st.lists(st.sampled_from([FULL, WINDOW, STATE]), min_size=1, max_size=4), st.integers(10_000, 10**9),
    st.integers(1, 1 << 20),
)  # fmt: skip
def test_loading_is_faster_from_the_break_even_on_and_not_before(
    members: list[LayerKv], active: int, tokens: int
) -> None:
    made = model(*members, active=active)
    first, found = break_even_tokens(made, MACHINE), times(made, MACHINE, tokens)
    assert (found.load_s < found.recompute_s) == (first is not None and tokens >= first)


def test_verdicts() -> None:
    pays, why = verdict(model(FULL, STATE), MACHINE)
    assert pays
    assert "from a shared prefix of 1667 tokens" in why
    pays, why = verdict(model(FULL, active=50_000), MACHINE)
    assert not pays
    assert "takes longer" in why
    pays, why = verdict(model(FULL, refusals=("a; b",)), MACHINE)
    assert not pays
    assert "1 reason(s)" in why
