"""A client of Mooncake's master, for :mod:`meshfusion.tools.bench.lookup_peer`; run by an interpreter that has it.

Not a part of the package: it imports nothing of ours. It reads a command a line on its standard input, as JSON, and
answers each with a line::

    {"do": "fill", "from": 0, "to": 1000000}                 -> {"seconds": ...}
    {"do": "run", "call": "replicas", "seconds": 5}          -> {"latencies_s": [...], "seconds": ..., "found": ...}

``found``: how many of the keys asked for were there. The store's segment lives in the client that fills it, and its
objects vanish with it, so that one has to stay.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]  # in an environment of its own

PROMPT_CHUNKS = 400
_PUT_AT_ONCE = 5_000
_VALUE = b"v" * 16
_SEGMENT_BYTES = 3 << 30
_BUFFER_BYTES = 64 << 20


def main() -> None:
    master, port = sys.argv[1:3]
    prompts, seed, is_filler = map(int, sys.argv[3:6])
    store = MooncakeDistributedStore()
    segment = _SEGMENT_BYTES if is_filler else 0
    failed = store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", segment, _BUFFER_BYTES, "tcp", "", master)
    if failed:
        sys.exit(f"the store's client did not start: error {failed}")
    client = _Client(store, prompts, seed)
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        say(client.fill(asked["from"], asked["to"]) if asked["do"] == "fill" else client.run(asked))
    store.close()


def say(answer: dict[str, Any]) -> None:
    """Its own lines begin with a mark: the library writes to the same place."""
    print("@" + json.dumps(answer), flush=True)


def key_of(prompt: int, chunk: int) -> str:
    """As long as ours, 32 characters, and as random."""
    return hashlib.blake2b(f"{prompt}/{chunk}".encode(), digest_size=16).hexdigest()


class _Client:
    def __init__(self, store: Any, prompts: int, seed: int) -> None:
        self._store, self._prompts, self._random = store, prompts, random.Random(seed)

    def fill(self, first: int, end: int) -> dict[str, Any]:
        began_s = time.monotonic()
        for at in range(first, end, _PUT_AT_ONCE):
            keys = [key_of(*divmod(i, PROMPT_CHUNKS)) for i in range(at, min(at + _PUT_AT_ONCE, end))]
            failed = self._store.put_batch(keys, [_VALUE] * len(keys))
            if failed:
                sys.exit(f"putting objects failed at {at}: error {failed}")
        return {"seconds": time.monotonic() - began_s}

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        exists = self._store.batch_is_exist
        call = exists if asked["call"] == "exist" else self._store.batch_get_replica_desc
        latencies_s, found = [], 0
        began_s = time.monotonic()
        while time.monotonic() - began_s < asked["seconds"]:
            prompt = self._random.randrange(self._prompts)
            keys = [key_of(prompt, i) for i in range(PROMPT_CHUNKS)]
            asked_s = time.perf_counter()
            answer = call(keys)
            latencies_s.append(time.perf_counter() - asked_s)
            found += answer.count(1) if call is exists else len(answer)
        return {"latencies_s": latencies_s, "seconds": time.monotonic() - began_s, "found": found}


if __name__ == "__main__":
    main()
