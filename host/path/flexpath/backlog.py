"""Requests that wait for room on a path, first come first served for each namespace. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from meshfusion.host.path.flexpath.requests import Request


class Backlog:
    def __init__(self) -> None:
        self._queues: dict[int, deque[Request]] = {}
        self._bytes: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request) -> None:
        self._queue(request).append(request)

    def add_first(self, request: Request) -> None:
        """One that had its turn already."""
        self._queue(request).appendleft(request)

    def nsids(self) -> list[int]:
        """Namespaces with requests that wait, in turns: the first one is the last one next time."""
        if len(self._queues) > 1:
            nsid = next(iter(self._queues))
            self._queues[nsid] = self._queues.pop(nsid)
        return list(self._queues)

    def first(self, nsid: int) -> Request | None:
        queue = self._queues.get(nsid)
        return queue[0] if queue else None

    def length_bytes(self, nsid: int) -> int:
        return self._bytes.get(nsid, 0)

    def pop(self, nsid: int) -> Request:
        request = self._queues[nsid].popleft()
        self._count_removed(nsid, [request])
        return request

    def take(self, condition: Callable[[Request], bool]) -> list[Request]:
        """Remove those, in order."""
        taken = []
        for nsid, queue in list(self._queues.items()):
            leaving = [request for request in queue if condition(request)]
            if leaving:
                self._queues[nsid] = deque(request for request in queue if not condition(request))
                self._count_removed(nsid, leaving)
                taken += leaving
        return taken

    def _queue(self, request: Request) -> deque[Request]:
        self._count += 1
        self._bytes[request.nsid] = self.length_bytes(request.nsid) + request.length_bytes
        return self._queues.setdefault(request.nsid, deque())

    def _count_removed(self, nsid: int, requests: Sequence[Request]) -> None:
        self._count -= len(requests)
        self._bytes[nsid] -= sum(request.length_bytes for request in requests)
        if not self._queues[nsid]:
            del self._queues[nsid], self._bytes[nsid]
