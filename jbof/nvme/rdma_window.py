"""A memory window of type 2 through pyverbs. Raises pyverbs' errors but where it says otherwise; nothing here waits.

A consumer of such windows has to note the key of each bind in the window (``ibv_mw.rkey``), for the next bind names it;
ibv_bind_mw(3) does so for those of type 1 only, and pyverbs has no way to. So the field is found here in memory, by all
that is known of what surrounds it, and written through its address.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any, Final

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.verbs_names import Verbs

_OWN_MEMORY: Final = Path("/proc/self/mem")  # where an address that is none is an error, and no signal
_IBV_MW: Final = struct.Struct("@PPIIi")  # context, pd, rkey, handle, type (infiniband/verbs.h)
_RKEY_OFFSET: Final = 16
_POINTER: Final = struct.Struct("@P")


class VerbsWindow:
    """``work_id``: of its binds, which complete only if they fail. ``access`` of a bind: of IBV_ACCESS_REMOTE_*."""

    def __init__(self, verbs: Verbs, pd: Any, work_id: int) -> None:
        self._verbs = verbs
        self._mw = verbs.MW(pd, verbs.IBV_MW_TYPE_2)
        self._noted_key = _noted_key(self._mw)
        self._work = verbs.SendWR(wr_id=work_id, opcode=verbs.IBV_WR_BIND_MW, send_flags=0)

    @property
    def key(self) -> int:
        """Of the last bind; before, what the device made it with."""
        return int(self._mw.rkey)

    def bind(self, qp: Any, key: int, mr: Any, address: int, length_bytes: int, access: int) -> None:
        """Post it on ``qp``. ``key`` follows the last one."""
        self._work.set_bind_wr(self._mw, self._verbs.MWBindInfo(mr, address, length_bytes, access))
        assert self._work.rkey == key, f"a bind with {self._work.rkey:#x} instead of {key:#x}"
        qp.post_send(self._work)
        self._noted_key.value = key

    def close(self) -> None:
        """Its key is dead when this returns. Again is no error."""
        self._mw.close()


def check_windows(verbs: Verbs, context: Any) -> None:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError`: the device has none of type 2."""
    flags = context.query_device().device_cap_flags
    if not flags & (verbs.IBV_DEVICE_MEM_WINDOW_TYPE_2A | verbs.IBV_DEVICE_MEM_WINDOW_TYPE_2B):
        raise UnsupportedError(
            f"{context.name} has no memory windows of type 2, which keys for one command need",
            next_step="Set key_scope: region, or use a NIC with such windows (ibv_devinfo -v: MEM_WINDOW_TYPE_2).",
        )


def _noted_key(mw: Any) -> ctypes.c_uint32:
    """``ibv_mw.rkey`` of a pyverbs.mr.MW: one of the object's words points to its ibv_mw."""
    words = ctypes.string_at(id(mw), type(mw).__basicsize__)
    expected = (mw.rkey, mw.handle, mw.type)
    fd = os.open(_OWN_MEMORY, os.O_RDONLY)
    try:
        found = {address for (address,) in _POINTER.iter_unpack(words) if _window_at(fd, address) == expected}
    finally:
        os.close(fd)
    if len(found) != 1:
        raise UnsupportedError(
            "this version of pyverbs keeps memory windows in a way that is not known",
            next_step="Set key_scope: region, or use a version of pyverbs from 44 to 59.",
        )
    return ctypes.c_uint32.from_address(found.pop() + _RKEY_OFFSET)


def _window_at(fd: int, address: int) -> tuple[int, int, int] | None:
    if not 0 < address < 1 << 63:
        return None
    try:
        data = os.pread(fd, _IBV_MW.size, address)
    except OSError:
        return None
    if len(data) < _IBV_MW.size:
        return None
    _, _, rkey, handle, kind = _IBV_MW.unpack(data)
    return rkey, handle, kind
