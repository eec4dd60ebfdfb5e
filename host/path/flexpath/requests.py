"""What is asked of FlexPath, what it asks of a path, and its errors, as values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.transfer_effects import TransferEffect


class Kind(enum.Enum):
    """A read may be repeated, once nobody can touch its memory any more. A write of unknown fate may not (rule 3)."""

    READ = "read"
    WRITE = "write"


@dataclass(slots=True, eq=False)
class Request:
    """One transfer for ``owner``, who hears its end as a transfer effect. ``error``: of its last attempt."""

    owner: object
    kind: Kind
    nsid: int
    length_bytes: int
    deadline_s: float
    tried: set[int] = field(default_factory=set)
    attempts: int = 0
    error: MeshFusionError | None = None
    is_told: bool = False  # that it is in doubt


@dataclass(slots=True, eq=False)
class Attempt:
    """Of a request on one path. ``bytes_ahead``: under way there when it began, itself included."""

    request: Request
    path: int
    begun_s: float
    deadline_s: float
    bytes_ahead: int


class Begin(NamedTuple):
    """Do it on its path, until its deadline. It must end as a transfer does, with the attempt as its owner."""

    attempt: Attempt


class PathChanged(NamedTuple):
    path: int
    state: PathState


SpreadEffect = Begin | PathChanged | TransferEffect


class NoPathError(MediaError):
    """No path reaches the namespace now."""


class RequestLateError(MediaError):
    """A request waited for a path until too little of its time was left."""


class TooManyRequestsError(MediaError):
    """More requests wait for paths than may wait."""
