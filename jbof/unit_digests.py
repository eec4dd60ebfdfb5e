"""Digests of whole units in memory, of whatever lengths come; from any thread."""

from __future__ import annotations

import threading

import numpy as np

from meshfusion.jbof.digest import WORD_BYTES, DigestKernels, load_kernels


class UnitDigests:
    """Keeps keys for the longest unit so far."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._kernels: DigestKernels | None = None

    def digest_of(self, unit: bytes | memoryview) -> bytes:
        """Of one unit; b"" for a length that no unit has."""
        if not len(unit) or len(unit) % WORD_BYTES:
            return b""
        with self._mutex:
            if self._kernels is None or self._kernels.max_bytes < len(unit):
                self._kernels = load_kernels(len(unit))
            kernels = self._kernels
        return kernels.digest_runs(np.frombuffer(unit, np.uint8), np.zeros(1, np.int64), len(unit))
