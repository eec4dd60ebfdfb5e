"""Page-aligned memory for O_DIRECT transfers."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt


class AlignedBuffer:
    """``size_bytes`` of zeroed, page-aligned, private memory: ``array`` (uint8[size_bytes]) and ``view`` are the same.

    ``huge_pages`` asks for transparent huge pages where the kernel has them; it is a wish, not a promise.
    """

    def __init__(self, size_bytes: int, *, huge_pages: bool = False) -> None:
        assert size_bytes > 0
        assert size_bytes % mmap.PAGESIZE == 0, f"{size_bytes} bytes are not whole pages"
        self.size_bytes = size_bytes
        self._map: mmap.mmap | None = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self._view: memoryview | None = memoryview(self._map)

    def __enter__(self) -> AlignedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        assert self._array is not None, "used after close"
        return self._array

    @property
    def view(self) -> memoryview:
        assert self._view is not None, "used after close"
        return self._view

    def close(self) -> None:
        """Give the memory back: now, or when the last array or view that callers still hold is gone."""
        memory, self._map, self._array, self._view = self._map, None, None, None
        if memory is not None:
            with contextlib.suppress(BufferError):
                memory.close()
