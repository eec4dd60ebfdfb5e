"""What can go wrong between the service and a target."""

from __future__ import annotations

from meshfusion.jbof.errors import MeshFusionError


class ExportError(MeshFusionError):
    """A target did not do what was asked."""


class TargetUnreachableError(ExportError):
    """No target, no answer in time, or an answer that makes no sense: what the last request did is unknown."""


class StepRefusedError(ExportError):
    """The target answered that it will not. ``code``: its error code (JSON-RPC error code, or an errno)."""

    def __init__(self, message: str, *, code: int, next_step: str) -> None:
        super().__init__(message, next_step=next_step)
        self.code = code


class StepPendingError(ExportError):
    """The target is still at it: not done, not failed."""
