"""The service's main thread while it serves: it heeds signals, and looks after the service's end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from meshfusion.dpu.api.service_types import Phase
from meshfusion.dpu.drain import Held
from meshfusion.dpu.drain_gate import DrainGate
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.mfctl.sd_notify import Notifier
from meshfusion.tools.mfctl.service_signals import ServiceSignals
from meshfusion.tools.mfctl.watchdog import Watchdog

log = logging.getLogger("meshfusion.service")

DRAIN_LOOK_S: Final = 0.05


class ServiceLife:
    """``stop_grace_s``: how long what is open may last after the first signal to end; the second ends it at once.
    ``reload``: for SIGHUP; what it raises it has told. ``ended_by``: the last signal to end, if it was one."""

    def __init__(
        self,
        gate: DrainGate,
        signals: ServiceSignals,
        notifier: Notifier,
        watchdog: Watchdog,
        *,
        stop_grace_s: Callable[[], float],
        reload: Callable[[], object],
    ) -> None:
        self._gate, self._signals, self._notifier, self._watchdog = gate, signals, notifier, watchdog
        self._stop_grace_s, self._reload = stop_grace_s, reload
        self.ended_by = "drained"
        self._ending_count = 0
        self._was_draining = False

    @property
    def is_hurried(self) -> bool:
        """Nobody is waited for any more."""
        return self._ending_count > 1

    def last(self) -> None:
        """Return when the service is to stop. Raises FormatError when its index is found to be damaged."""
        self._notifier.tell("READY=1", "STATUS=Serving.")
        try:
            while not self._looked():
                self._watchdog.tend(time.monotonic())
                self._signals.wait(self._timeout_s())
                for name in self._signals.take_endings():
                    self._ending(name)
                if self._signals.take_reload():
                    with contextlib.suppress(MeshFusionError):
                        self._reload()
        finally:
            self._notifier.tell("STOPPING=1", "STATUS=Stopping.")

    def _timeout_s(self) -> float | None:
        due_s = self._watchdog.due_in_s(time.monotonic())
        if not self._was_draining:
            return due_s
        return DRAIN_LOOK_S if due_s is None else min(DRAIN_LOOK_S, due_s)

    def _ending(self, name: str) -> None:
        self._ending_count += 1
        self.ended_by = name
        log.info("%s: stopping%s", name, " at once" if self.is_hurried else "")
        self._gate.begin(0.0 if self.is_hurried else self._stop_grace_s())

    def _looked(self) -> bool:
        phase, held, remaining_s = self._gate.look()
        if phase is Phase.SERVING:
            return False
        if not self._was_draining:
            self._was_draining = True
            if not self._ending_count:
                log.info("asked by a call to drain: stopping")
            if phase is Phase.DRAINING:
                log.info("draining for at most %.1f s: %s open", remaining_s, _words(held))
                self._notifier.tell(f"STATUS=Draining: {_words(held)} open.")
        if phase is Phase.CUT_SHORT:
            log.warning(
                "stopping with %s open: writes are lost, their space is given back by the next life; readers "
                "compute what they would have loaded",
                _words(held),
            )
        return phase.is_last


def _words(held: Held) -> str:
    return f"{held.writes} writes and {held.leases} leases"
