"""A writer that falls silent and does not know it, in a process of its own: ``python silent_writer.py``.

It minds no rules: when it wakes up it writes through its old queue pairs, connects again as whom it was, and commits
what it was granted. It is told what to do by lines of JSON, and answers each with one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.nvme.auth_keys import parse_secret
from meshfusion.jbof.nvme.initiator import Initiator, connect
from meshfusion.jbof.nvme.pending import PendingTransfer

IDENTITY = b"W" * 32
SIZE = api.ShardSize(0, 64 << 10, 4)
GRANTS, DONE, UNDER_WAY = 10, 2, 6  # two are written, six are being written, two it has not begun
MARK = ord("W")  # every byte that it writes
HEARTBEAT_S = 0.5
DEADLINE_S, WRITE_S, CONNECT_S = 10.0, 60.0, 5.0
NSID = 1


class SilentWriter:
    def __init__(self, address: str, portal: str, source: str) -> None:
        """``portal``: of those of the export, the one that it goes through; ``source``: its own end of that way."""
        self._service = GrpcChunkService(address)
        self._portal, self._source = portal, source
        request = api.AttachRequest(
            uuid.uuid4().hex, "vllm", "1", "guest", os.getpid(), IDENTITY, 1, access=api.Access.NVMEOF
        )
        self._request = request
        self._attachment = self._service.attach(request, deadline_s=DEADLINE_S)
        assert self._attachment.export is not None
        self._export = self._attachment.export
        self._is_muted = threading.Event()
        threading.Thread(target=self._heartbeats, daemon=True).start()
        self._initiator = self._connected(self._export.subsystem_nqn)
        self._grants = self._reserve("before")
        lba_count = self._grants[0].extents[0].lba_count
        self._memory = np.full(lba_count * LBA_BYTES, MARK, np.uint8)
        self._region = self._initiator.register(self._memory)
        self._pending: list[PendingTransfer] = []

    def begin(self) -> dict[str, Any]:
        """Some of what was granted is written."""
        for grant in self._grants[:DONE]:
            self._begin_write(grant.extents[0]).wait()
        return {
            "holder": self._attachment.holder_id,
            "host_nqn": self._export.host_nqn,
            "extents": [[e.lba, e.lba_count, e.segment, e.generation] for grant in self._grants for e in grant.extents],
        }

    def begin_more(self) -> dict[str, Any]:
        """Some of it is under way."""
        more = self._grants[DONE : DONE + UNDER_WAY]
        self._pending = [self._begin_write(grant.extents[0]) for grant in more]
        return {"under_way": sum(not pending.has_ended for pending in self._pending)}

    def mute(self) -> dict[str, Any]:
        """No heartbeats from now on."""
        self._is_muted.set()
        return {"under_way": sum(not pending.has_ended for pending in self._pending)}

    def go_on(self) -> dict[str, Any]:
        """As if no time had passed: everything that it was granted is written, through the old queue pairs first, and
        once more when it has been noticed that these are gone."""
        begun = [self._begin_write(grant.extents[0]) for grant in self._grants]
        at_once = [_outcome(pending.wait) for pending in begun]
        under_way = [_outcome(pending.wait) for pending in self._pending]
        time.sleep(2.0)  # it connects again by itself, if it can
        again = [_outcome(self._begin_write(grant.extents[0]).wait) for grant in self._grants]
        return {"at_once": _kinds(at_once), "under_way": _kinds(under_way), "again": _kinds(again)}

    def connect_again(self, subsystem_nqns: list[str]) -> dict[str, Any]:
        """As whom it was, with its key: to its own subsystem, and to these."""
        nqns = (self._export.subsystem_nqn, *subsystem_nqns)
        return {nqn: _outcome(partial(self._connected, nqn)) for nqn in nqns}

    def ask(self) -> dict[str, Any]:
        """Everything that a holder may ask for."""
        holder_id, epoch, service = self._attachment.holder_id, self._attachment.epoch, self._service
        items = tuple(api.CommitItem(g.grant_id, ((b"d" * 8,) * SIZE.unit_count,)) for g in self._grants)
        commit = api.CommitRequest(holder_id, epoch, items)
        heartbeat = api.HeartbeatRequest(holder_id, epoch, ())
        match = api.MatchRequest(holder_id, "r", 64, (api.GroupKeys(0, (b"k" * 32,), (0,)),))
        return {
            "commit": _outcome(partial(service.commit, commit, deadline_s=DEADLINE_S)),
            "heartbeat": _outcome(partial(service.heartbeat, heartbeat, deadline_s=DEADLINE_S)),
            "reserve": _outcome(partial(self._reserve, "after")),
            "match": _outcome(partial(service.match, match, deadline_s=DEADLINE_S)),
            "attach": _outcome(partial(service.attach, self._request, deadline_s=DEADLINE_S)),
        }

    def _connected(self, subsystem_nqn: str) -> Initiator:
        key = parse_secret(self._export.host_key) if self._export.host_key else None
        host_nqn = self._export.host_nqn
        return connect(
            self._portal,
            self._export.portals[0].service,
            subsystem_nqn,
            host_nqn,
            uuid.uuid5(uuid.NAMESPACE_URL, host_nqn),
            source_address=self._source,
            timeout_s=CONNECT_S,
            io_queue_count=1,
            keep_alive_timeout_s=600.0,  # so that it is not the target's patience that ends its queue pairs
            backoff_first_s=0.2,
            host_key=key,
        )

    def _reserve(self, name: str) -> list[api.ReserveResult]:
        keys = [uuid.uuid4().bytes + name.encode().ljust(16, b".") for _ in range(GRANTS)]
        items = tuple(api.ReserveItem(key, 0, 64 * i, 64, (SIZE,)) for i, key in enumerate(keys))
        request = api.ReserveRequest(self._attachment.holder_id, self._attachment.epoch, items)
        results = self._service.reserve(request, deadline_s=DEADLINE_S).results
        assert all(result.outcome is api.ReserveOutcome.GRANTED for result in results), results
        return list(results)

    def _begin_write(self, extent: api.Extent) -> PendingTransfer:
        return self._initiator.begin_write(NSID, extent.lba, [self._region.all()], timeout_s=WRITE_S)

    def _heartbeats(self) -> None:
        request = api.HeartbeatRequest(self._attachment.holder_id, self._attachment.epoch, ())
        while not self._is_muted.wait(HEARTBEAT_S):
            _outcome(lambda: self._service.heartbeat(request, deadline_s=DEADLINE_S))


def _outcome(action: Callable[[], object]) -> str:
    """``done``, or why not."""
    try:
        answer = action()
    except MeshFusionError as error:
        return f"{type(error).__name__}: {error.message}"
    return f"done: {answer}" if answer is not None else "done"


def _kinds(outcomes: list[str]) -> dict[str, int]:
    return dict(Counter(outcome.split(":")[0] for outcome in outcomes))


def main() -> None:
    writer: SilentWriter | None = None
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        if what == "attach":
            writer = SilentWriter(**order)
            answer = writer.begin()
        else:
            answer = getattr(writer, what)(**order)
        print(json.dumps(answer), flush=True)
    os._exit(0)  # its initiators hold queue pairs that nobody will end


if __name__ == "__main__":
    main()
