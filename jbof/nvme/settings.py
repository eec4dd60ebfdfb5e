"""Who connects to what, and how patiently."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.fabrics import check_nqn
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.nvme.rdma_cm import MAX_QUEUE_DEPTH, MIN_QUEUE_DEPTH


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """One association. ``where`` names the target in errors, such as its address.

    ``io_queue_count`` and ``io_queue_depth`` are wishes: a controller may grant less. ``admin_timeout_s`` bounds each
    admin command. ``keep_alive_timeout_s`` is what the target is told; a Keep Alive is sent every half of it, and one
    that is not answered by the next loses the connection. Reconnection is tried after ``backoff_first_s``, doubled each
    time up to ``backoff_max_s``, until ``loss_timeout_s`` after the connection was lost. ``kill_alarm_s``: when the
    death of a queue pair that is not confirmed is reported. ``shutdown_timeout_s`` bounds each half of an orderly
    disconnect: commands under way, then the controller's shutdown.

    ``host_key`` proves the host to targets that want DH-HMAC-CHAP. With ``controller_key`` the target must prove itself
    too, and one that does not authenticate at all is refused.

    ``key_scope``: what the key of a read or write opens; the transport must be made for the same.
    """

    subsystem_nqn: str
    host_nqn: str
    host_id: uuid.UUID
    where: str
    io_queue_count: int = 4
    io_queue_depth: int = 128
    admin_queue_depth: int = 32
    max_waiting_commands: int = 64
    connect_timeout_s: float = 3.0
    admin_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 10.0
    shutdown_timeout_s: float = 5.0
    backoff_first_s: float = 0.5
    backoff_max_s: float = 10.0
    loss_timeout_s: float = 60.0
    kill_alarm_s: float = 5.0
    host_key: Secret | None = field(default=None, repr=False)
    controller_key: Secret | None = field(default=None, repr=False)
    key_scope: KeyScope = KeyScope.REGION

    def __post_init__(self) -> None:
        check_nqn(self.subsystem_nqn, what="subsystem NQN")
        check_nqn(self.host_nqn, what="host NQN")
        _check("io_queue_count", self.io_queue_count, 1, 1024)
        _check("io_queue_depth", self.io_queue_depth, MIN_QUEUE_DEPTH, MAX_QUEUE_DEPTH)
        _check("admin_queue_depth", self.admin_queue_depth, MIN_ADMIN_QUEUE_DEPTH, MAX_QUEUE_DEPTH)
        _check("max_waiting_commands", self.max_waiting_commands, 0, 1 << 20)
        for name in _TIMES:
            _check(name, getattr(self, name), 1e-3, 1e6)
        if self.controller_key is not None and self.host_key is None:
            raise ConfigError(
                "controller_key is set without host_key; a controller authenticates only to a host that does",
                next_step="Set host_key too, or remove controller_key.",
            )

    @property
    def keep_alive_interval_s(self) -> float:
        return self.keep_alive_timeout_s / 2


MIN_ADMIN_QUEUE_DEPTH = 16  # requests for events, a keep-alive, and one command of each conversation fit in

_TIMES = (
    "connect_timeout_s",
    "admin_timeout_s",
    "keep_alive_timeout_s",
    "shutdown_timeout_s",
    "backoff_first_s",
    "backoff_max_s",
    "loss_timeout_s",
    "kill_alarm_s",
)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"{name} is {value}; it must lie between {low:g} and {high:g}", next_step=f"Set {name} within these bounds."
        )
