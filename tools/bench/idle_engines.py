"""Engines that are attached and ask for nothing, for :mod:`meshfusion.tools.bench.service_idle`: each with a connection
of its own, and a heartbeat as often as the service wants one. Ends with its standard input."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from pathlib import Path
from typing import Final

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.tools.bench.index_fill import IDENTITY

_DEADLINE_S: Final = 30.0


def main() -> None:
    address, count = sys.argv[1], int(sys.argv[2])
    stop = threading.Event()
    engines = [_Engine(address) for _ in range(count)]
    threads = [threading.Thread(target=engine.beat, args=(stop,)) for engine in engines]
    for thread in threads:
        thread.start()
    print('@{"ready": true}', flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.close()


class _Engine:
    def __init__(self, address: str) -> None:
        self._service = GrpcChunkService(address)
        request = api.AttachRequest(uuid.uuid4().hex, "vllm", "1", "h", os.getpid(), IDENTITY, 1)
        self._attachment = self._service.attach(request, deadline_s=_DEADLINE_S)
        self._lock = hold_liveness(Path(self._attachment.liveness_path))

    def beat(self, stop: threading.Event) -> None:
        attachment = self._attachment
        while not stop.wait(attachment.heartbeat_s):
            request = api.HeartbeatRequest(attachment.holder_id, attachment.epoch, ())
            self._service.heartbeat(request, deadline_s=_DEADLINE_S)

    def close(self) -> None:
        os.close(self._lock)
        self._service.detach(api.DetachRequest(self._attachment.holder_id), deadline_s=_DEADLINE_S)
        self._service.close()


if __name__ == "__main__":
    main()
