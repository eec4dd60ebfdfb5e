"""A restart in the middle of a trace."""

from __future__ import annotations

from meshfusion.jbof.policy.density_policy import PolicySettings
from meshfusion.tools.sim.restart import Restart, second_half
from meshfusion.tools.sim.run import SimSettings
from meshfusion.tools.sim.trace import Trace
from tests.tools.sim.traces import trace_of

SETTINGS = SimSettings(1024, 4, None, PolicySettings(1 << 14, 1 << 14, refresh_chunks=1024))
DOCUMENTS, DOCUMENT_BLOCKS, QUESTION_BLOCKS = 20, 16, 4


def documents_and_questions(rounds: int) -> Trace:
    """Documents asked for in turn; after each comes a short prompt that is never asked for again."""
    documents = [list(range(i * DOCUMENT_BLOCKS, (i + 1) * DOCUMENT_BLOCKS)) for i in range(DOCUMENTS)]
    prompts: list[list[int]] = []
    total = DOCUMENTS * DOCUMENT_BLOCKS
    for _ in range(rounds):
        for document in documents:
            prompts += [document, list(range(total, total + QUESTION_BLOCKS))]
            total += QUESTION_BLOCKS
    return trace_of(prompts, gap_s=2.0)


def test_a_policy_that_begins_anew_loses_few_hits() -> None:
    trace = documents_and_questions(30)
    capacity = DOCUMENTS * DOCUMENT_BLOCKS * 5 // 4
    found = {restart: second_half(trace, capacity, SETTINGS, restart).hits for restart in Restart}
    most = 15 * DOCUMENTS * DOCUMENT_BLOCKS
    assert found[Restart.NONE] > 0.9 * most
    for restart in (Restart.TOLD, Restart.UNTOLD):
        assert 0.95 * found[Restart.NONE] < found[restart] < found[Restart.NONE]
