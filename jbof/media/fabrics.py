"""Does a file or block device lie behind the kernel's NVMe-oF initiator, and how long does I/O then wait for a lost
connection?

Two things are different there. I/O that a drive would fail at once waits until a connection is back, or is given up:
after ``fast_io_fail_tmo`` or ``ctrl_loss_tmo`` of the controller. And a write that failed may still be done: the target
may have it, and the kernel does not ask. (Linux: Documentation/ABI/testing/sysfs-nvme, drivers/nvme/host/fabrics.c.)
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SYSFS: Final = Path("/sys")
_FABRICS: Final = frozenset({"tcp", "rdma", "fc"})  # "loop" is inside of this machine, "pcie" a drive in it


@dataclass(frozen=True, slots=True)
class FabricsLink:
    """A controller of the kernel's initiator, such as nvme0. ``fails_after_s``: after its connection was found lost I/O
    waits that long; None: for ever."""

    controller: str
    transport: str
    fails_after_s: int | None


def fabrics_links(status: os.stat_result, sysfs: Path = _SYSFS) -> tuple[FabricsLink, ...]:
    """Of the block device, or of the one that a file lies on; through partitions and device mapper.

    Never raises: what sysfs does not show is no link. A filesystem over several devices (btrfs) shows none.
    """
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    disk = sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    return tuple(sorted(set(_links_below(disk)), key=lambda link: link.controller))


def longest_wait_s(links: tuple[FabricsLink, ...]) -> int | None:
    """Until I/O fails when all of ``links``, at least one, are lost. None: it never does."""
    waits = [link.fails_after_s for link in links]
    return None if None in waits else max(wait for wait in waits if wait is not None)


def _links_below(disk: Path) -> Iterator[FabricsLink]:
    disk = disk.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    for lower in disk.glob("slaves/*"):
        yield from _links_below(lower)
    device = disk / "device"
    # With multipath a namespace is its subsystem's, which lists the controllers; without it is its controller's.
    for place in (device, *sorted(device.glob("nvme*"))):
        transport = _text(place / "transport")
        if transport in _FABRICS:
            yield FabricsLink(place.resolve().name, transport, _fails_after_s(place))


def _fails_after_s(controller: Path) -> int | None:
    texts = (_text(controller / name) for name in ("fast_io_fail_tmo", "ctrl_loss_tmo"))
    return min((int(text) for text in texts if text.isdecimal()), default=None)  # "off": not by this one


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
