"""Value types of the administration of the service's process. Nothing here does I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class Phase(enum.Enum):
    """Of the process, from its first answer to its last. CUT_SHORT: the deadline passed while something was open."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    CUT_SHORT = "cut short"

    @property
    def is_last(self) -> bool:
        """The process stops now."""
        return self in (Phase.DRAINED, Phase.CUT_SHORT)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """``remaining_s``: until the deadline of draining, 0 in any other phase. ``open_write_count``: reservations that
    may yet be committed, and those being asked for; ``open_lease_count``: of readers."""

    version: str
    pid: int
    uptime_s: float
    phase: Phase
    remaining_s: float = 0.0
    open_write_count: int = 0
    open_lease_count: int = 0


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """``within_s``: from now, what is open may end; asked again, the sooner end holds. ``wait_s``: the answer may take
    so long, 10 s at most, and comes as soon as the end has."""

    within_s: float
    wait_s: float = 0.0


class KeyChange(enum.Enum):
    """How far a host's new key is, when it was asked for. What is not done goes on by itself; NOT_WRITTEN is tried
    again in a minute. UNABLE: the host was not heard of yet, or its engine is of an earlier release and keeps its key.
    """

    DONE = "done"
    HOST_LACKS_IT = "the host has not learned it yet"
    TARGET_LACKS_IT = "the target has not got it yet"
    NOT_WRITTEN = "it could not be written to its file, see the service's log"
    UNABLE = "its engine has not said that it takes new keys"


@dataclass(frozen=True, slots=True)
class ReplaceKeysRequest:
    """``pool``: of several; empty: all of them. ``holder_id``: whose; empty: of every host. ``wait_s``: the answer may
    take so long, 10 s at most, and comes as soon as all have their keys."""

    pool: str = ""
    holder_id: str = ""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplacedKey:
    holder_id: str
    change: KeyChange


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """``key``: with dots, such as medium.free_fraction; ``before``, ``after``: as people read them."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """What the file says otherwise than the service runs with: taken over, or not before it is started anew."""

    applied: tuple[ConfigChange, ...]
    needs_restart: tuple[ConfigChange, ...]


class ServiceAdmin(Protocol):
    """For operators. Each call can be repeated."""

    def state(self, *, deadline_s: float) -> ServiceState: ...
    def drain(self, request: DrainRequest, *, deadline_s: float) -> ServiceState: ...

    def reload(self, *, deadline_s: float) -> ReloadReport:
        """Read the configuration anew. Raises ConfigError, with all that is wrong with it; nothing has changed then."""

    def replace_keys(self, request: ReplaceKeysRequest, *, deadline_s: float) -> tuple[ReplacedKey, ...]:
        """New keys for hosts of the exports, whose connections stay. Raises ServiceError for a holder or pool that is
        not there, and UnsupportedError where hosts have no keys."""
        ...

    def stacks(self, *, deadline_s: float) -> str:
        """What the threads of the process are at."""
        ...
