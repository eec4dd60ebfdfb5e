"""Probes a pool now and then, on one thread of its own, and keeps what came of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from meshfusion.dpu.api.event_types import Severity
from meshfusion.dpu.telemetry.event_log import EventSink
from meshfusion.dpu.telemetry.pool_words import called
from meshfusion.dpu.telemetry.probe_result import ProbeResult, ProbeState, ProbeView

logger = logging.getLogger("meshfusion.probe")

DEADLINE_S: Final = 10.0  # one that takes longer has failed, whenever it ends
_SEVERITIES: Final = {ProbeState.OK: Severity.INFO, ProbeState.DEGRADED: Severity.WARNING}


class Probe(Protocol):
    """See :class:`~meshfusion.dpu.telemetry.chunk_probe.ChunkProbe`. ``step`` may be read by any thread."""

    step: str

    @property
    def heartbeat_s(self) -> float | None: ...

    def prepare(self) -> None:
        """What takes its time once, and is no part of a probe."""
        ...

    def run(self) -> ProbeResult: ...

    def beat(self) -> None: ...

    def close(self) -> None: ...


class Prober:
    """``name``: as :func:`~meshfusion.dpu.telemetry.pool_words.called` takes it. ``interval_s``: from the end of a
    probe to the next. ``clock`` reads monotonic seconds."""

    def __init__(
        self,
        probe: Probe,
        sink: EventSink,
        *,
        interval_s: float,
        name: str = "",
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._sink = sink
        self._interval_s = interval_s
        self._called = called(name)
        self._deadline_s = deadline_s
        self._clock = clock
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._begun_s: float | None = None
        self._ended_s = 0.0
        self._result: ProbeResult | None = None
        self._thread = threading.Thread(target=self._loop, name="meshfusion-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more probes. Does not wait, for whoever has several to end."""
        self._stop.set()

    def close(self, *, wait_s: float | None = None) -> None:
        """A probe that hangs is left behind. ``wait_s``: its deadline, without one."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(self._deadline_s if wait_s is None else wait_s)

    def view(self) -> ProbeView:
        """The last result, or that the next one is overdue. Never waits."""
        now_s = self._clock()
        with self._mutex:
            begun_s, result, ended_s = self._begun_s, self._result, self._ended_s
        if begun_s is not None and now_s - begun_s > self._deadline_s:
            reason = f"the probe has been at this for {now_s - begun_s:.0f} s: {self._probe.step}"
            return ProbeView(ProbeState.FAILING, (reason,), now_s - begun_s, 0.0)
        if result is None:
            return ProbeView(ProbeState.UNKNOWN, ("the first probe has not ended yet",))
        age_s = now_s - ended_s
        written_age_s = None if result.written_age_s is None else result.written_age_s + age_s
        return ProbeView(result.state, result.reasons, result.seconds, age_s, written_age_s)

    def _loop(self) -> None:
        self._probe.prepare()
        next_s = self._clock()
        while not self._stop.is_set():
            now_s = self._clock()
            if now_s >= next_s:
                self._run()
                next_s = self._clock() + self._interval_s
            else:
                self._probe.beat()
            wait_s = max(0.0, next_s - self._clock())
            self._stop.wait(min(wait_s, self._probe.heartbeat_s or wait_s))
        self._probe.close()

    def _run(self) -> None:
        with self._mutex:
            self._begun_s = self._clock()
        try:
            result = self._probe.run()
        except Exception as error:  # a defect of the probe is no reason to be silent from then on
            logger.exception("the probe of %s failed", self._called)
            result = ProbeResult(ProbeState.FAILING, (f"the probe itself failed: {error!r}",))
        with self._mutex:
            before, self._result = self._result, result
            self._begun_s, self._ended_s = None, self._clock()
        was = ProbeState.UNKNOWN if before is None else before.state
        if result.state is not was:
            self._tell(result)

    def _tell(self, result: ProbeResult) -> None:
        why = "; ".join(result.reasons)
        severity = _SEVERITIES.get(result.state, Severity.ERROR)
        text = f"the probe of {self._called} is {result.state.value}" + (f": {why}" if why else "")
        self._sink.tell("probe_changed", text, severity=severity, state=result.state.value)
        level = {Severity.INFO: logging.INFO, Severity.WARNING: logging.WARNING}.get(severity, logging.ERROR)
        logger.log(level, "%s", text)


def not_probed() -> ProbeView:
    """Where there is no prober."""
    return ProbeView(ProbeState.UNKNOWN, ("the pool is not probed: telemetry.probe is off",))
