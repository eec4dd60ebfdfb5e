"""What can go wrong with a guest."""

from __future__ import annotations

from meshfusion.jbof.errors import MeshFusionError


class LabError(MeshFusionError):
    """The guest could not be prepared, booted or reached, or it ended before its command did."""


class GuestDeadlineError(LabError):
    """The command was not done at its deadline; the guest was ended."""
