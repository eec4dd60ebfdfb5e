"""``mfctl service drain``: asks, waits until nothing is open, and until the service is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from meshfusion.dpu.api.service_types import DrainRequest, ServiceState
from meshfusion.jbof.errors import ServiceError, ServiceUnavailableError

if TYPE_CHECKING:
    from meshfusion.dpu.api.service_types import ServiceAdmin

ANSWER_S: Final = 5.0
SLICE_S: Final = 2.0
# What closing a pool takes: its budgets are noted, and its drives given back.
GONE_S: Final = 60.0


def drain_service(
    admin: ServiceAdmin, within_s: float, told: Callable[[ServiceState], None], *, now_s: Callable[[], float]
) -> ServiceState:
    """The last state that was heard of; the service has stopped answering then. ``told``: each state on the way.

    Raises what the first call raises, and ServiceError when the service answers long after its end.
    """
    end_s = now_s() + within_s
    state = admin.drain(DrainRequest(within_s), deadline_s=ANSWER_S)
    while not state.phase.is_last:
        told(state)
        wait_s = min(SLICE_S, max(0.05, end_s - now_s()))
        request = DrainRequest(max(0.0, end_s - now_s()), wait_s)
        try:
            state = admin.drain(request, deadline_s=wait_s + ANSWER_S)
        except ServiceUnavailableError:
            break  # it ended between two answers
    _until_gone(admin, now_s)
    return state


def _until_gone(admin: ServiceAdmin, now_s: Callable[[], float]) -> None:
    give_up_s = now_s() + GONE_S
    while now_s() < give_up_s:
        began_s = now_s()
        try:
            admin.state(deadline_s=ANSWER_S)
        except ServiceUnavailableError:
            if now_s() - began_s < ANSWER_S:  # else it only did not answer in time
                return
        time.sleep(0.05)
    raise ServiceError(
        f"the chunk service drained and still answers after {GONE_S:.0f} s", next_step="Look at its log."
    )
