"""What a queue pair keeps of its commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.completion import Completion
from meshfusion.jbof.nvme.transport import Bind


@dataclass(slots=True, eq=False)
class PostedCommand:
    """``bind``: of its window; ``reported``: as ended, while it keeps its place in the queue."""

    owner: object
    deadline_s: float
    bind: Bind | None
    sent: bool = False
    completion: Completion | None = None
    is_key_dead: bool = False
    reported: bool = False

    @property
    def is_over(self) -> bool:
        """Nobody touches its memory or its capsule any more."""
        return self.sent and self.completion is not None and (self.bind is None or self.is_key_dead)


class WaitingCommand(NamedTuple):
    owner: object
    command: Command
    deadline_s: float
