"""Which processors the threads of a path may use."""

from __future__ import annotations

import contextlib
import multiprocessing
import os

Cpus = frozenset[int]


def engine_cpus() -> Cpus:
    """Those of this process and of the engine process that started it.

    An engine may bind its worker's main thread to one processor (vLLM on CPUs does, one thread of the model to each),
    and every thread made from there inherits that. Transfers would then share one processor with a thread that never
    rests: measured, they took two to three times as long. What the user allowed the engine as a whole stays the limit.
    """
    own = os.sched_getaffinity(0)
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return frozenset(own)
    try:
        return frozenset(own | os.sched_getaffinity(parent.pid))
    except OSError:  # it is gone
        return frozenset(own)


def use_cpus(cpus: Cpus) -> None:
    """Let the calling thread run on these, as far as the system allows; on what it had otherwise."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
