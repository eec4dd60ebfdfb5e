"""What a worker of an engine does to a service, at random, until it is killed; each step is told on stdout.

``do`` comes before a step and ``done`` when the service has acknowledged it. A service that goes away is waited for.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.jbof.errors import ServiceUnavailableError, StaleHolderError
from tests.dpu.pool_cases import DEADLINE_S, Holder, key

CHUNKS = 60


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(address: str, seed: str) -> None:
    rng = random.Random(int(seed))
    client = GrpcChunkService(address)
    while True:
        try:
            holder = Holder(client)
            while True:
                (drop if rng.random() < 0.2 else save)(holder, rng)
        except (ServiceUnavailableError, StaleHolderError):
            time.sleep(0.05)


def save(holder: Holder, rng: random.Random) -> None:
    i, salt = rng.randrange(CHUNKS), rng.getrandbits(30)
    result = holder.reserve(i, units=rng.choice((1, 3, 7)))
    if result.outcome is not api.ReserveOutcome.GRANTED:
        return
    digests = holder.write(i, result, seed=salt)
    extent = result.extents[0]
    fields = {"i": i, "digests": [digest.hex() for digest in digests]}
    tell(do="commit", **fields, segment=extent.segment, generation=extent.generation)
    if holder.commit(result, digests):
        tell(done="commit", i=i)
    else:
        tell(done="nothing", i=i)


def drop(holder: Holder, rng: random.Random) -> None:
    i = rng.randrange(CHUNKS)
    found = holder.pool.get_chunk(key(i), deadline_s=DEADLINE_S)
    if found is None:
        return
    tell(do="drop", i=i)
    request = api.DropRequest(holder.id, key(i), found.shards[0].extent, "a test")
    tell(done="drop" if holder.pool.drop(request, deadline_s=DEADLINE_S) else "nothing", i=i)


if __name__ == "__main__":
    main(*sys.argv[1:])
