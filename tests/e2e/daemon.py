"""The service as a process that tests start, stop, freeze and kill."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.types import PoolStatus
from meshfusion.jbof.errors import ServiceUnavailableError

READY_S = 60.0
HEARTBEAT_S = 0.5


class Daemon:
    """``meshfusion`` over the pool ``folder/pool``, on the socket ``folder/s``."""

    def __init__(
        self,
        folder: Path,
        *,
        data_path: Path | None = None,
        silence_s: float = 2.0,
        size: str = "96MiB",
        segment_size: str = "8MiB",
        more: str = "",
        changed_by: str = "",
    ) -> None:
        """``more``: YAML of further parts of the configuration. ``changed_by``: Python that runs in the service's
        process before it starts, to plant a bug."""
        self.address = f"unix://{folder}/s"
        self.pool = folder / "pool"
        self._log = folder / "daemon.log"
        self._config = folder / "service.yaml"
        self._changed_by = changed_by
        data = f", data_path: {data_path}" if data_path is not None else ""
        self._config.write_text(
            f"listen: {self.address}\n"
            f"pool: {{path: {self.pool}, create: true, size: {size}, segment_size: {segment_size}{data}}}\n"
            f"leases: {{heartbeat_s: {HEARTBEAT_S}, lease_ttl_s: {2 * silence_s}, holder_silence_s: {silence_s}, "
            f"grant_ttl_s: 60}}\n"
            f"{more}"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def connector(self) -> dict[str, Any]:
        return {"service": self.address}

    def start(self) -> None:
        code = f"{self._changed_by}\nfrom meshfusion.tools.mfctl.main import service_main; service_main()"
        command = [sys.executable, "-c", code, "--config", str(self._config), "--format", "json"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], READY_S)
        line = self._process.stdout.readline() if ready else b""
        assert line, self._log.read_text()[-3000:]
        assert json.loads(line)["ready"] is True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0, self._log.read_text()[-3000:]
        self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It accepts connections and never answers."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def status(self) -> PoolStatus:
        client = GrpcChunkService(self.address)
        try:
            return client.status(deadline_s=10.0)
        finally:
            client.close()

    def wait_idle(self, *, holders: int, timeout_s: float = 30.0) -> PoolStatus:
        """Until nothing is leased or granted and ``holders`` are attached."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                status = self.status()
            except ServiceUnavailableError:  # on a busy machine it may take longer to accept than a client waits
                assert time.monotonic() < end_s, self._log.read_text()[-3000:]
                continue
            if (status.lease_count, status.grant_count, status.pinned_bytes, len(status.holders)) == (0, 0, 0, holders):
                return status
            assert time.monotonic() < end_s, status
            time.sleep(0.1)
