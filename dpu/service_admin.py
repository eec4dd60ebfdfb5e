"""What operators ask of the process that serves a pool: how it stands, and to stop in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from meshfusion.dpu.api.service_types import (
    DrainRequest,
    Phase,
    ReloadReport,
    ReplacedKey,
    ReplaceKeysRequest,
    ServiceState,
)
from meshfusion.dpu.config_types import MAX_SECONDS
from meshfusion.dpu.drain import Held
from meshfusion.dpu.drain_gate import DrainGate
from meshfusion.dpu.stacks import thread_stacks
from meshfusion.jbof.errors import ConfigError

# So much of a call's time is left for its answer to arrive in.
_ANSWER_S = 0.5
# A call that waits keeps a thread from those that engines make.
_MAX_WAIT_S = 10.0


class ServedServiceAdmin:
    """A :class:`~meshfusion.dpu.api.service_types.ServiceAdmin`. ``wake``: whoever looks after ``gate`` is to look.
    ``reload``: as the call, from any thread. ``replace_keys``: of which pool's which holder, and how long it may wait.
    """

    def __init__(
        self,
        gate: DrainGate,
        *,
        version: str,
        wake: Callable[[], None],
        reload: Callable[[], ReloadReport],
        replace_keys: Callable[[str, str, float], tuple[ReplacedKey, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate, self._version, self._wake, self._clock = gate, version, wake, clock
        self._reload, self._replace_keys = reload, replace_keys
        self._began_s = clock()

    def state(self, *, deadline_s: float) -> ServiceState:
        return self._told(*self._gate.look())

    def drain(self, request: DrainRequest, *, deadline_s: float) -> ServiceState:
        """Raises :class:`ConfigError` for a deadline that no service may take."""
        if not 0 <= request.within_s <= MAX_SECONDS:
            raise ConfigError(
                f"deadline of draining: {request.within_s:g} s", next_step=f"Use 0 to {MAX_SECONDS} seconds."
            )
        self._gate.begin(request.within_s)
        self._wake()
        self._gate.wait(min(request.wait_s, _MAX_WAIT_S, max(0.0, deadline_s - _ANSWER_S)))
        return self._told(*self._gate.look())

    def reload(self, *, deadline_s: float) -> ReloadReport:
        return self._reload()

    def replace_keys(self, request: ReplaceKeysRequest, *, deadline_s: float) -> tuple[ReplacedKey, ...]:
        wait_s = min(request.wait_s, _MAX_WAIT_S, max(0.0, deadline_s - _ANSWER_S))
        return self._replace_keys(request.pool, request.holder_id, wait_s)

    def stacks(self, *, deadline_s: float) -> str:
        return thread_stacks()

    def _told(self, phase: Phase, held: Held, remaining_s: float) -> ServiceState:
        return ServiceState(
            version=self._version,
            pid=os.getpid(),
            uptime_s=self._clock() - self._began_s,
            phase=phase,
            remaining_s=remaining_s,
            open_write_count=held.writes,
            open_lease_count=held.leases,
        )
