"""Errors of Linux' block layer that tell about a drive (block/blk-core.c, ``blk_errors``)."""

from __future__ import annotations

import errno
from typing import Final

RESERVATION_CONFLICT: Final = errno.EBADE
"""Of a write or read that another host's reservation forbids (BLK_STS_RESV_CONFLICT, before 6.5 BLK_STS_NEXUS)."""
