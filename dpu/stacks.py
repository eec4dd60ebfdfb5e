"""What every thread of this process is at, for people who look for what it is stuck at."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Final

# So that an answer fits into a message, however many threads there are.
MAX_STACKS_CHARS: Final = 1 << 20


def thread_stacks() -> str:
    """Names of threads with their stacks, the innermost call last. No values of variables."""
    names = {thread.ident: f"{thread.name}{' (daemon)' if thread.daemon else ''}" for thread in threading.enumerate()}
    parts = []
    for ident, frame in sorted(sys._current_frames().items()):
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {ident} {names.get(ident, 'not of Python')}\n{stack}")
    return "\n".join(parts)[:MAX_STACKS_CHARS]
