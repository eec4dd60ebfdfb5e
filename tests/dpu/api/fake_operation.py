"""An administration of the service's process that answers, and does nothing."""

from __future__ import annotations

from meshfusion.dpu.api.service_types import (
    DrainRequest,
    Phase,
    ReloadReport,
    ReplacedKey,
    ReplaceKeysRequest,
    ServiceState,
)


class FakeOperation:
    """Keeps the contract of :class:`~meshfusion.dpu.api.service_types.ServiceAdmin`."""

    def state(self, *, deadline_s: float) -> ServiceState:
        return ServiceState(version="1", pid=7, uptime_s=1.0, phase=Phase.SERVING)

    def drain(self, request: DrainRequest, *, deadline_s: float) -> ServiceState:
        return self.state(deadline_s=deadline_s)

    def reload(self, *, deadline_s: float) -> ReloadReport:
        return ReloadReport((), ())

    def replace_keys(self, request: ReplaceKeysRequest, *, deadline_s: float) -> tuple[ReplacedKey, ...]:
        return ()

    def stacks(self, *, deadline_s: float) -> str:
        return "MainThread"
