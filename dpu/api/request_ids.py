"""The name under which one request is found in the logs of both sides: sent with each call as metadata."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

METADATA_KEY: Final = "meshfusion-request-id"
MAX_CHARS: Final = 200

current_request_id: ContextVar[str] = ContextVar("meshfusion_request_id", default="")
"""Of the call that this thread is making or answering; "" outside of one."""


def request_id_of(request: object) -> str:
    """What a call is sent under: the request's own id where it has one, else that of the call within which it is made,
    else a random one."""
    named = {getattr(part, "request_id", "") for part in (request, *getattr(request, "items", ()))} - {""}
    if len(named) == 1:  # of several, none stands for the call
        return printable_id(str(named.pop()))
    return current_request_id.get() or uuid.uuid4().hex


def received_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """What a call came under; a random one where its sender named none."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str) and value:
            return printable_id(value)
    return uuid.uuid4().hex


def printable_id(text: str) -> str:
    """As metadata may be, and a line of a log: ASCII without control characters."""
    return "".join(c if " " < c < "\x7f" else "?" for c in text[:MAX_CHARS])
