"""The processes of :mod:`meshfusion.tools.bench.lookup_peer`: clients that take commands, and Mooncake's master."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshfusion.jbof.errors import MediaError

START_S: Final = 60.0
FILL_S: Final = 3 * 3600.0


class Client:
    """A process that answers a line of JSON with one of its own, marked with ``@``."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.answer(START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **asked: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """Raises MediaError when there is none in that time."""
        stdout, end_s = self._process.stdout, time.monotonic() + deadline_s
        assert stdout is not None
        while select.select([stdout], [], [], max(0.0, end_s - time.monotonic()))[0]:
            line = stdout.readline()
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
            if not line:
                break
        raise MediaError("a client of the benchmark did not answer", next_step=f"look into {self._log}")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def our_client(address: str, prompts: int, seed: int, log: Path) -> Client:
    return Client([sys.executable, "-m", "meshfusion.tools.bench.lookup_client", address, str(prompts), str(seed)], log)


@dataclass(frozen=True, slots=True)
class Mooncake:
    """``python``: an interpreter whose environment has ``mooncake-transfer-engine-non-cuda``. Ports are on loopback."""

    python: Path
    pid: int
    address: str
    log: Path

    def client(self, prompts: int, seed: int, *, is_filler: bool = False) -> Client:
        script = Path(__file__).with_name("lookup_mooncake.py")
        arguments = [self.address, free_port(), prompts, seed, int(is_filler)]
        return Client([str(self.python), str(script), *map(str, arguments)], self.log)


@contextmanager
def mooncake_master(python: Path, log: Path) -> Iterator[Mooncake]:
    """Its master as it comes, but for where it listens. Raises MediaError when it does not start."""
    where = "import mooncake; print(mooncake.__path__[0])"
    found = subprocess.run([str(python), "-c", where], capture_output=True, text=True, check=False)
    if found.returncode:
        raise MediaError(
            f"{python} has no Mooncake", next_step="pip install mooncake-transfer-engine-non-cuda into its environment"
        )
    rpc_port, metrics_port = free_port(), free_port()
    binary = Path(found.stdout.strip()) / "mooncake_master"
    options = [f"--rpc_port={rpc_port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics_port}", "--logtostderr"]
    with log.open("a") as stderr:
        process = subprocess.Popen([str(binary), *options], stdout=stderr, stderr=stderr)
    try:
        await_port(rpc_port, process, log)
        yield Mooncake(python, process.pid, f"127.0.0.1:{rpc_port}", log)
    finally:
        process.terminate()
        process.wait()


def await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise MediaError("Mooncake's master did not start", next_step=f"look into {log}")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
