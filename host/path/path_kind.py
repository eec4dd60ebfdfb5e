"""The ways that bytes may go between the medium and KV memory."""

from __future__ import annotations

import enum


class PathKind(enum.Enum):
    """``rdma``: :mod:`meshfusion.host.path.rdma`; ``block`` and ``staged`` likewise."""

    RDMA = "rdma"
    BLOCK = "block"
    STAGED = "staged"
