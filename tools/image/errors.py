"""What can keep a bundle from being built."""

from __future__ import annotations

from meshfusion.dpu.image.errors import ImageError


class BuildError(ImageError):
    """A bundle or a lock could not be made; nothing of it is left behind."""


class GoneError(BuildError):
    """What a lock names cannot be had any more: the lock has to be made anew."""
