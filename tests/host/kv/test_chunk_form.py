"""What one lookup asks for stays within what the service takes, however long the prompt."""

from __future__ import annotations

import pytest

from meshfusion.dpu.api.limits import MalformedMessageError, check_group_counts
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, LastWindow, ResumeRule, WholePrefix


@pytest.mark.parametrize("groups", [1, 3, 64])
def test_a_very_long_prompt_asks_for_as_much_as_the_service_takes(groups: int) -> None:
    rules: list[ResumeRule] = [WholePrefix(), *[LastWindow(100)] * (groups - 1)]
    form = ChunkForm(tuple(GroupPlan(i, rule, 16, 16) for i, rule in enumerate(rules)), (4096,) * groups)
    chunks = form.boundary_max(1 << 24)
    check_group_counts([chunks] * groups)
    with pytest.raises(MalformedMessageError):
        check_group_counts([chunks + 1] * groups)
    assert form.boundary_max(16 * 100 + 5) == 100
