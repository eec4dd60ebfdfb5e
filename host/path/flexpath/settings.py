"""How full paths are kept, how patient one is with them, and how they come back."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.jbof.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SpreadSettings:
    """For every path alike.

    - A path has at most ``max_outstanding_bytes`` under way, or one request; and ``max_outstanding_requests``. Within
      that it gets as much as it moves in its latency and ``queue_s``: more would wait there although another path may
      become free sooner. One that was not measured yet gets ``min_outstanding_bytes`` and is taken for
      ``assumed_bandwidth_bytes_per_s`` and ``assumed_latency_s``.
    - Without an answer for ``suspect_s`` a path gets nothing new; without one for ``patience_s`` its reads are given
      up, so that they can be replayed elsewhere. Both are longer on a path that is expected to take long:
      ``patience_factor`` times what it should need.
    - A path that failed is not used for ``quarantine_s``, doubled each time it fails again up to
      ``quarantine_max_s``, until it was good for ``forgive_s``; but not longer than ``quarantine_s`` after its last
      failure where no other path leads to what it reaches. It comes back with ``reentry_share`` of its bytes,
      doubled every ``reentry_step_s`` in which it worked.
    - A path from which nothing was heard for ``probe_s`` gets a read, so that a slow one is found to be fast again.
    - A namespace that a path refused is not asked for there for ``access_pause_s``, or until the target says more.
    - A request that has less than ``least_time_s`` left is not sent, nor one whose path is expected to need more than
      half of what is left: a command that misses its deadline costs the connection, and puts writes in doubt that had
      all the time they needed.
    - A transfer is cut into requests of ``piece_bytes``, so that a large one goes over several paths.
    - A request is tried ``max_attempts`` times; ``max_waiting`` requests may wait for room on a path.
    """

    max_outstanding_bytes: int = 64 << 20
    min_outstanding_bytes: int = 2 << 20
    max_outstanding_requests: int = 1024
    piece_bytes: int = 4 << 20
    queue_s: float = 0.05
    assumed_bandwidth_bytes_per_s: float = 1e9
    assumed_latency_s: float = 0.001
    suspect_s: float = 0.1
    patience_s: float = 0.4
    patience_factor: float = 4.0
    quarantine_s: float = 1.0
    quarantine_max_s: float = 30.0
    forgive_s: float = 30.0
    reentry_share: float = 1 / 16
    reentry_step_s: float = 0.25
    probe_s: float = 1.0
    access_pause_s: float = 1.0
    least_time_s: float = 0.05
    max_attempts: int = 4
    max_waiting: int = 4096

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, not above 0", next_step=f"Set {name} above 0.")
        if self.min_outstanding_bytes > self.max_outstanding_bytes:
            raise ConfigError(
                f"min_outstanding_bytes {self.min_outstanding_bytes} is above max_outstanding_bytes "
                f"{self.max_outstanding_bytes}",
                next_step="Set min_outstanding_bytes to at most max_outstanding_bytes.",
            )
        if self.suspect_s > self.patience_s:
            raise ConfigError(
                f"suspect_s {self.suspect_s:g} is above patience_s {self.patience_s:g}",
                next_step="Set suspect_s to at most patience_s.",
            )
        if self.reentry_share > 1:
            raise ConfigError(
                f"reentry_share is {self.reentry_share:g}, above 1", next_step="Set reentry_share to at most 1."
            )
