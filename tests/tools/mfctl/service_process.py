"""A service as a process over a small real pool, for tests of how it is run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


def small_config(directory: Path, more: str = "") -> Path:
    """Of a pool of seven segments that is made with it, served on a socket in ``directory``."""
    path = directory / "service.yaml"
    path.write_text(
        f"listen: unix://{directory}/s\n"
        f"pool: {{path: {directory}/pool, create: true, size: 8MiB, segment_size: 1MiB}}\n" + more
    )
    return path


class ServiceProcess:
    """Ready when made; killed at the end of its block, if it is there still. Its log is kept in a file."""

    def __init__(self, config: Path, environment: Mapping[str, str] | None = None, *, waits: bool = True) -> None:
        self.config = config
        self.log_path = config.with_suffix(".log")
        code = "from meshfusion.tools.mfctl.main import service_main; service_main()"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--config", str(config)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        if waits:
            self.wait_ready()

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        timer = threading.Timer(60.0, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line.startswith("ready "), self.log

    @property
    def address(self) -> str:
        return f"unix://{self.config.parent}/s"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def end(self, timeout_s: float = 30.0) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout_s)

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()
