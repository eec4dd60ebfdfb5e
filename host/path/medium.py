"""What a path needs of a way to the medium: movers that its threads use, each thread its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshfusion.host.memory.kv_memory import Produced
from meshfusion.host.path.load_job import LoadJob, UnitFailure
from meshfusion.host.path.shards import ShardWrite
from meshfusion.host.path.spans import Span
from meshfusion.jbof.errors import MediaError


class WriteInDoubtError(MediaError):
    """A write may still be done, until the target confirms that its writer is gone (rule 3)."""


class Loader(Protocol):
    """Used by one thread."""

    def load(self, job: LoadJob, span: Span) -> Sequence[UnitFailure | None]:
        """Bring the units of ``span`` into their blocks and prove them there (rule 4): an outcome for each.

        Device memory is written, by whomever, only between ``job.enter()`` and ``job.leave()``. Raises
        :class:`~meshfusion.jbof.errors.MeshFusionError` when none of them can be said to have arrived.
        """
        ...

    def close(self) -> None: ...


class Saver(Protocol):
    """Used by one thread."""

    def write(self, shard: ShardWrite) -> tuple[bytes, ...]:
        """Write it, once ``shard.produced``; the digests of its units.

        Raises :class:`~meshfusion.jbof.errors.MeshFusionError` when it failed, and of these :class:`WriteInDoubtError`
        when it may be done later.
        """
        ...

    def flush(self) -> None:
        """Everything written before is durable when this returns. Called when no saver writes."""
        ...

    def close(self) -> None: ...


class Medium(Protocol):
    """``read_lbas``: how much of it a loader takes in at a time, at most. ``save_depth``: how many savers write at a
    time: while one waits for the medium, another gathers and digests."""

    @property
    def read_lbas(self) -> int: ...

    @property
    def save_depth(self) -> int: ...

    def loader(self) -> Loader: ...

    def saver(self) -> Saver: ...

    def produced(self) -> Produced:
        """Now, in the work of the engine's thread, which calls this. Raises MeshFusionError."""
        ...

    def interrupt(self, deadline_s: float) -> None:
        """The path closes: end what is under way at ``deadline_s`` if it would not end by itself."""
        ...

    def close(self) -> None:
        """When all loaders and savers are closed."""
        ...
