"""What a queue pair tells its owner, as values, and the errors of commands that it could not finish."""

from __future__ import annotations

import enum
from typing import NamedTuple

from meshfusion.jbof.errors import MediaError, MeshFusionError
from meshfusion.jbof.nvme.completion import Completion
from meshfusion.jbof.nvme.transport import PostCapsule, TransportEffect


class QueueState(enum.Enum):
    NEW = "new"
    CONNECTING = "connecting"
    LIVE = "live"
    DYING = "dying"  # death was asked for and is not confirmed
    DEAD = "dead"


class Finished(NamedTuple):
    owner: object
    completion: Completion


class NotSent(NamedTuple):
    owner: object
    error: MeshFusionError


class InDoubt(NamedTuple):
    owner: object
    error: MeshFusionError


class MemoryFree(NamedTuple):
    owner: object


CommandEffect = Finished | NotSent | InDoubt | MemoryFree


class QueueUp(NamedTuple):
    link: int


class QueueLost(NamedTuple):
    """Commands can no longer be sent; all that were posted are in doubt, and the link is being killed."""

    link: int
    error: MeshFusionError


class QueueDead(NamedTuple):
    link: int


SubmissionEffect = PostCapsule | NotSent
QueueEffect = TransportEffect | CommandEffect | QueueUp | QueueLost | QueueDead


class QueueLostError(MediaError):
    """The queue pair was lost while a command was waiting or under way."""


class CommandDeadlineError(MediaError):
    """A command was not answered before its deadline."""


class QueueFullError(MediaError):
    """More commands wait for a queue pair than may wait."""
