"""Responses by hand, and queue pairs to give them to."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.io_commands import flush
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.queue_effects import (
    QueueEffect,
    QueueUp,
    SubmissionEffect,
)
from meshfusion.jbof.nvme.transport import LinkUp, OpenLink, PostCapsule, Received

LINK = 9
WINDOW_KEYS = (0x0100FF, 0x020000, 0x030007)
BROKEN = MediaError("broken", next_step="none")


def accept(entries: int) -> bytes:
    """RDMA Figure 6: record format 0, CRQSIZE."""
    return struct.pack("<HH28x", 0, entries)


def response(command_id: int, status: int = 0, result: int = 0, sq_id: int = 0, phase: int = 0) -> Received:
    """Base Figures 96 to 99. ``status`` is type and code."""
    return Received(LINK, struct.pack("<QHHHH", result, 0, sq_id, command_id, status << 1 | phase))


def new_queue(depth: int = 4, max_waiting: int = 2, key_scope: KeyScope = KeyScope.REGION) -> QueuePair:
    queue = QueuePair(LINK, depth, max_waiting=max_waiting, where="test", key_scope=key_scope)
    windows = depth - 1 if key_scope is KeyScope.COMMAND else 0
    assert queue.open(b"private", 5.0) == [OpenLink(LINK, depth, b"private", 5.0, windows)]
    return queue


def live_queue(depth: int = 4, max_waiting: int = 2, entries: int = 100) -> QueuePair:
    queue = new_queue(depth, max_waiting)
    assert queue.handle(0.0, LinkUp(LINK, accept(entries))) == [QueueUp(LINK)]
    return queue


def queue_with_windows(depth: int = 4, max_waiting: int = 2) -> QueuePair:
    """Window ``i`` was made with the key WINDOW_KEYS[i]."""
    queue = new_queue(depth, max_waiting, KeyScope.COMMAND)
    assert queue.handle(0.0, LinkUp(LINK, accept(100), WINDOW_KEYS[: depth - 1])) == [QueueUp(LINK)]
    return queue


def posted(effects: Sequence[QueueEffect]) -> list[int]:
    return [effect.command_id for effect in effects if isinstance(effect, PostCapsule)]


def submit(queue: QueuePair, owner: object, now_s: float = 0.0, deadline_s: float = 10.0) -> list[SubmissionEffect]:
    return queue.submit(now_s, owner, flush(1), deadline_s)
