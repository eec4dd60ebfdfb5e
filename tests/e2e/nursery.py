"""Processes that have imported vLLM already: ``python -m tests.e2e.nursery SOCKET_FD``.

Importing it takes ten seconds of a processor, and the tests start some fifty engines. The nursery imports it once and
forks a process for each call, which then is as one that was started with ``python -m MODULE CHANNEL_FD``: it has never
had an engine. What counts while vLLM is imported (the seed of Python's hashes, for one) is the nursery's: a test that
changes such a variable needs a process of its own.

A call is one JSON object, ``{"module": ..., "environment": {...}}``, with three descriptors: the child's channel, its
log, and a pipe that is told its process id and, when it has ended, its exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

MODULES: Final = ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")
_CALL_BYTES: Final = 1 << 20
_IMPORT_S: Final = 300.0


class Process(Protocol):
    """What tests need of :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class ForkedProcess:
    """A process that the nursery made. ``told``: the pipe that says its process id and its exit status."""

    def __init__(self, told: int) -> None:
        self._told = os.fdopen(told)
        self._status: int | None = None
        if not select.select([told], [], [], _IMPORT_S)[0] or not (line := self._told.readline()):
            raise RuntimeError("the nursery has not made a process")
        self.pid = int(line)

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal."""
        if self._status is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._status = os.waitstatus_to_exitcode(int(self._told.readline()))
            self._told.close()
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The nursery as its user has it. It ends with its socket."""

    def __init__(self, environment: Mapping[str, str], *, folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.nursery", str(theirs.fileno())],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()

    def process(self, module: str, environment: Mapping[str, str], *, channel: int, log: int) -> ForkedProcess:
        """As ``python -m MODULE CHANNEL`` with all output to ``log``."""
        told, tell = os.pipe()
        call = json.dumps({"module": module, "environment": dict(environment)}).encode()
        try:
            socket.send_fds(self._channel, [call], [channel, log, tell])
        finally:
            os.close(tell)
        return ForkedProcess(told)


# ---- in the nursery ----------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> None:
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()  # so that the children's collections do not copy what they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of the minders
    while True:
        call, descriptors, _, _ = socket.recv_fds(channel, _CALL_BYTES, 3)
        if not call:
            return
        if os.fork() == 0:
            channel.close()
            _mind(json.loads(call), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _mind(call: dict[str, object], channel: int, log: int, tell: int) -> None:
    """Make the process and wait for its end, so that it leaves its number as soon as it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        _become(call, channel, log)
    os.write(tell, f"{pid}\n".encode())
    os.close(channel)
    os.close(log)
    os.write(tell, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def _become(call: dict[str, object], channel: int, log: int) -> None:
    module, environment = call["module"], call["environment"]
    assert isinstance(module, str)
    assert isinstance(environment, dict)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, str(channel)]
    status = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
