"""What a server lets somebody see of its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import grpc
from google.protobuf.message import Message

Handle = Callable[[bytes, grpc.ServicerContext], bytes]


class CallObserver(Protocol):
    def watch(self, call: str, handle: Handle) -> Handle:
        """``handle`` as it is to be served, for the call of that name. Asked once for each call, before the first."""
        ...

    def answered(self, call: str, request: Message, reply: Message | None) -> None:
        """Told within ``handle``, on its thread, of what the call came to; ``reply`` None: it was refused."""
        ...


class NobodyWatches:
    """Keeps the contract of :class:`CallObserver`."""

    def watch(self, call: str, handle: Handle) -> Handle:
        return handle

    def answered(self, call: str, request: Message, reply: Message | None) -> None:
        pass
