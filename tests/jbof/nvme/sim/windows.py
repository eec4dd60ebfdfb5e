"""The memory windows of one connection, as its device keeps them: what is bound, and by which key it is reached."""

from __future__ import annotations

from meshfusion.jbof.nvme.transport import Bind
from tests.jbof.nvme.sim.memory import REGION_NUMBER, HostMemory
from tests.jbof.nvme.sim.rules import must


class SimWindows:
    """``memory``: what they are bound to."""

    def __init__(self, link: int, count: int, memory: HostMemory) -> None:
        # The last 8 bits go round soon.
        self.keys = tuple((link << 12 | window) << 8 | 0xFD for window in range(count))
        self._last = list(self.keys)
        self._bound: dict[int, Bind] = {}  # by window
        self._memory = memory

    @property
    def bound_keys(self) -> list[int]:
        return [bind.key for bind in self._bound.values()]

    def bind(self, bind: Bind, address: int, length_bytes: int, *, is_written: bool) -> None:
        """For a command whose descriptor and direction are these."""
        must(bind.window not in self._bound, "window", bind.window, "is bound while its key lives")
        last = self._last[bind.window]
        must(bind.key == (last & ~0xFF | (last + 1) % 256), "the key of a bind does not follow the last one")
        must((bind.memory.address, bind.memory.length_bytes) == (address, length_bytes), "a window of another size")
        must(bind.is_written is is_written, "a window in the wrong direction")
        must(bind.memory.rkey == REGION_NUMBER or bind.memory.rkey > 100, "a window on what is no region")
        self._last[bind.window] = bind.key
        self._bound[bind.window] = bind
        self._memory.count_window(address, length_bytes, bind.memory.rkey, 1)

    def opened_by(self, key: int) -> Bind | None:
        return next((bind for bind in self._bound.values() if bind.key == key), None)

    def kill(self, key: int) -> bool:
        """False: it was dead."""
        bind = self.opened_by(key)
        if bind is None:
            return False
        del self._bound[bind.window]
        self._memory.count_window(bind.memory.address, bind.memory.length_bytes, bind.memory.rkey, -1)
        return True

    def kill_all(self) -> None:
        for key in self.bound_keys:
            self.kill(key)
