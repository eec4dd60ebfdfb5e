"""What a key that a target is told opens, and for how long."""

from __future__ import annotations

import enum


class KeyScope(enum.Enum):
    """Of the memory of reads and writes. See :mod:`meshfusion.jbof.nvme.memory` for what each is worth."""

    REGION = "region"  # all that was registered, until it is deregistered
    COMMAND = "command"  # one command's bytes, in its direction, until it has ended
