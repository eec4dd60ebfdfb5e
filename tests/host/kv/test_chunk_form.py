"""How an engine's KV is cut into chunks, and how many of them one lookup asks for."""

from __future__ import annotations

import pytest

from meshfusion.dpu.api.limits import MalformedMessageError, check_group_counts
from meshfusion.host.kv.chunk_form import ChunkForm, form_of
from meshfusion.host.kv.resume import GroupPlan, LastWindow, ResumeRule, StateAtBoundary, WholePrefix
from meshfusion.jbof.errors import UnsupportedError
from tests.host.support.kv_memory import of_blocks, on_one_grid


@pytest.mark.parametrize("groups", [1, 3, 64])
def test_a_very_long_prompt_asks_for_as_much_as_the_service_takes(groups: int) -> None:
    rules: list[ResumeRule] = [WholePrefix(), *[LastWindow(100)] * (groups - 1)]
    form = ChunkForm(tuple(GroupPlan(i, rule, 16, 16) for i, rule in enumerate(rules)), (4096,) * groups)
    chunks = form.boundary_max(1 << 24)
    check_group_counts([chunks] * groups)
    with pytest.raises(MalformedMessageError):
        check_group_counts([chunks + 1] * groups)
    assert form.boundary_max(16 * 100 + 5) == 100


@pytest.mark.parametrize(
    ("rules", "sizes", "chunk_tokens"),
    [
        ([WholePrefix()], [16], 16 * 9),  # blocks of 2400 bytes, 20000 asked for
        ([WholePrefix(), LastWindow(40)], [16, 32], 32 * 5),  # 4800 bytes of the whole prefix in 32 tokens
        ([LastWindow(40)], [16], 16 * 9),
        ([WholePrefix(), StateAtBoundary()], [16, 48], 48),  # states: as short as can be
    ],
)
def test_chunks_are_as_short_as_blocks_and_size_allow(
    rules: list[ResumeRule], sizes: list[int], chunk_tokens: int
) -> None:
    groups = on_one_grid([(2, 1200)] * len(rules), blocks=8)
    layouts = [of_blocks(kv, size).layout for kv, size in zip(groups, sizes, strict=True)]
    form = form_of(layouts, rules, chunk_min_bytes=20_000)
    assert form.chunk_tokens == chunk_tokens
    assert [plan.block_tokens for plan in form.plans] == sizes
    assert form.unit_bytes == (2400,) * len(rules)


def test_a_model_whose_tokens_read_nothing_before_them_is_refused() -> None:
    (kv,) = on_one_grid([(2, 1200)], blocks=8)
    with pytest.raises(UnsupportedError, match="nothing of this model is worth storing"):
        form_of([kv.layout], [LastWindow(1)], chunk_min_bytes=4096)
