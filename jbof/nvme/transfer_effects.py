"""How transfers end, as values, and the error for a namespace that is not reached."""

from __future__ import annotations

from typing import NamedTuple

from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.controller_effects import ControllerEffect


class TransferDone(NamedTuple):
    owner: object


class TransferFailed(NamedTuple):
    """``is_retryable``: the same transfer may succeed later, or on another path."""

    owner: object
    error: MeshFusionError
    is_retryable: bool


class TransferInDoubt(NamedTuple):
    owner: object
    error: MeshFusionError


class TransferMemoryFree(NamedTuple):
    owner: object


TransferEffect = TransferDone | TransferFailed | TransferInDoubt | TransferMemoryFree
SessionEffect = ControllerEffect | TransferEffect


class PathUnusableError(MediaError):
    """The controller does not reach the namespace now; another path may."""
