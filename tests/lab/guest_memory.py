"""Runs in the guest, as ``python guest_memory.py CASE``: who can reach registered memory, and until when.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.jbof.errors import MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.controller_effects import ControllerState
from meshfusion.jbof.nvme.initiator import Initiator
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.registration import DmaBufRange
from meshfusion.jbof.nvme.sgl import RemoteMemory
from tests.lab.guest_initiator import LBA_BYTES, exported, join, take_down, until

BEFORE, ON_MEDIUM = 5, 7


def keys() -> dict[str, object]:
    """The target is told a key that was closed, and one of another association: it must not get anywhere with them."""
    with exported() as address:
        initiator, _ = join(address, backoff_first_s=0.1)
        other, _ = join(address)
        medium = np.full(LBA_BYTES, ON_MEDIUM, np.uint8)
        initiator.write(1, 0, [initiator.register(medium).all()])
        closed, foreign, good = (np.full(LBA_BYTES, BEFORE, np.uint8) for _ in range(3))
        good_region = initiator.register(good)
        closed_region, foreign_region = initiator.register(closed), other.register(foreign)
        closed_remote = closed_region.remote
        closed_region.close()
        reached = {
            "live": read_with(initiator, good_region.remote),
            "closed": read_with(initiator, closed_remote) or bool((closed != BEFORE).any()),
            "foreign": read_with(initiator, foreign_region.remote) or bool((foreign != BEFORE).any()),
        }
        until(lambda: initiator.state is ControllerState.LIVE)
        good[:] = BEFORE
        initiator.read(1, 0, [good_region.all()])
        other.read(1, 0, [foreign_region.all()])  # whose it is
        by_right = bool((good == ON_MEDIUM).all() and (foreign == ON_MEDIUM).all())
        initiator.close()
        other.close()
    return {"reached": reached, "by_right": by_right, "regions_left": not foreign_region.is_closed, "left": take_down()}


def read_with(initiator: Initiator, remote: RemoteMemory) -> bool:
    """Does the target say that it wrote there? Waits for the connection that this may have cost."""
    until(lambda: initiator.state is ControllerState.LIVE)
    forged = RegisteredRegion(remote, None, lambda: None)
    try:
        initiator.read(1, 0, [forged.all()], timeout_s=3.0)
    except MeshFusionError:
        return False
    return True


def dma_buf() -> dict[str, object]:
    """soft-RoCE takes none: that is told as what it is, and nothing else is harmed."""
    with exported() as address:
        initiator, _ = join(address)
        fd = os.memfd_create("not-a-dma-buf")
        try:
            initiator.register_dma_buf(DmaBufRange(fd, 0, LBA_BYTES), writable=True, owner=None)
        except UnsupportedError as error:
            refusal = error.message
        else:
            refusal = ""
        memory = np.zeros(LBA_BYTES, np.uint8)
        initiator.read(1, 0, [initiator.register(memory).all()])
        initiator.close()
    return {"refusal": refusal, "left": take_down()}


CASES = (keys, dma_buf)

if __name__ == "__main__":
    np.seterr(all="raise")
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
