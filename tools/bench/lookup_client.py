"""A client of our service, for :mod:`meshfusion.tools.bench.lookup_peer`: what
:mod:`meshfusion.tools.bench.lookup_mooncake` is for the other one, with the same commands but for filling.

Leases are given back many at once and outside of what is timed, but within what the service's processor time is
counted over: Mooncake's lapse by themselves, and ours would pin half of the pool before they do.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.tools.bench.index_fill import CHUNK_TOKENS, IDENTITY, prompt_keys

_DEADLINE_S: Final = 30.0
_RELEASED_AT_ONCE: Final = 16


def main() -> None:
    address, prompts, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    service = GrpcChunkService(address)
    request = api.AttachRequest(uuid.uuid4().hex, "vllm", "1", "h", os.getpid(), IDENTITY, 1)
    attachment = service.attach(request, deadline_s=_DEADLINE_S)
    lock = hold_liveness(Path(attachment.liveness_path))
    client = _Client(service, attachment, prompts, seed)
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        say(client.beat(asked["seconds"]) if asked["call"] == "heartbeat" else client.match(asked["seconds"]))
    os.close(lock)
    service.detach(api.DetachRequest(attachment.holder_id), deadline_s=_DEADLINE_S)
    service.close()


def say(answer: dict[str, Any]) -> None:
    print("@" + json.dumps(answer), flush=True)


class _Client:
    def __init__(self, service: GrpcChunkService, attachment: api.Attachment, prompts: int, seed: int) -> None:
        self._service, self._prompts = service, prompts
        self._holder_id, self._epoch = attachment.holder_id, attachment.epoch
        self._random, self._asked = random.Random(seed), 0

    def beat(self, seconds: float) -> dict[str, Any]:
        """What every call costs: one of a few bytes that does next to nothing."""
        latencies_s: list[float] = []
        request = api.HeartbeatRequest(self._holder_id, self._epoch, ())
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            asked_s = time.perf_counter()
            self._service.heartbeat(request, deadline_s=_DEADLINE_S)
            latencies_s.append(time.perf_counter() - asked_s)
        return {"latencies_s": latencies_s, "seconds": time.monotonic() - began_s, "found": 0}

    def match(self, seconds: float) -> dict[str, Any]:
        latencies_s: list[float] = []
        leases: list[str] = []
        found = 0
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            keys = prompt_keys(self._random.randrange(self._prompts))
            self._asked += 1
            request = api.MatchRequest(self._holder_id, f"r{self._asked}", CHUNK_TOKENS, (keys,))
            asked_s = time.perf_counter()
            reply = self._service.match(request, deadline_s=_DEADLINE_S)
            latencies_s.append(time.perf_counter() - asked_s)
            found += len(reply.chunks)
            leases.append(reply.lease_id)
            if len(leases) == _RELEASED_AT_ONCE:
                self._release(leases)
        self._release(leases)
        return {"latencies_s": latencies_s, "seconds": time.monotonic() - began_s, "found": found}

    def _release(self, leases: list[str]) -> None:
        if leases:
            self._service.release(api.ReleaseRequest(self._holder_id, tuple(leases)), deadline_s=_DEADLINE_S)
            leases.clear()


if __name__ == "__main__":
    main()
