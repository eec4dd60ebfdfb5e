"""The configuration that a service runs with, and taking over what its file says anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from meshfusion.dpu.api.service_types import ReloadReport
from meshfusion.dpu.config import LogConfig, ServiceConfig, load_service_config
from meshfusion.dpu.config_changes import compare
from meshfusion.jbof.errors import MeshFusionError

log = logging.getLogger("meshfusion.service")


class Reloader:
    """For several threads. ``running``: read from ``path`` when the service began. ``retune``: all pools to what a
    configuration says of them; it raises ConfigError, and may have changed some of them then. ``relog``: the log goes
    on like that; it raises before it changes anything."""

    def __init__(
        self,
        path: Path,
        running: ServiceConfig,
        *,
        retune: Callable[[ServiceConfig], None],
        relog: Callable[[LogConfig], None],
    ) -> None:
        self._path, self._running = path, running
        self._retune, self._relog = retune, relog
        self._lock = threading.Lock()  # one reload at a time

    @property
    def running(self) -> ServiceConfig:
        """What the service runs with."""
        return self._running

    def reload(self) -> ReloadReport:
        """All that the file says and that can be changed now, or nothing. Raises what is wrong with it."""
        with self._lock:
            try:
                report = self._take_over()
            except MeshFusionError as error:
                log.error("the configuration is not reloaded, and nothing has changed: %s", error)
                raise
        for change in report.applied:
            log.warning("reloaded: %s is %s (was %s)", change.key, change.after, change.before)
        for change in report.needs_restart:
            log.warning("reloaded, but %s needs a restart: %s (is %s)", change.key, change.after, change.before)
        if not (report.applied or report.needs_restart):
            log.info("reloaded: nothing has changed")
        return report

    def _take_over(self) -> ReloadReport:
        before = self._running
        changes = compare(before, load_service_config(self._path))
        after = changes.running
        try:
            self._retune(after)
            self._relog(after.log)
        except MeshFusionError:
            self._retune(before)  # to which they were tuned before, so it fits
            raise
        self._running = after
        return changes.report
