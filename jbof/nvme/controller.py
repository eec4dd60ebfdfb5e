"""A controller's life as its host sees it: one association after the other, until it is closed or given up.

No I/O, no clock: times and randomness come in, effects go out. A new association begins only when every queue pair of
the one before is dead, so that no late RDMA access can meet a new command.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from meshfusion.jbof.errors import ConfigError, MediaError, MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.association import Association
from meshfusion.jbof.nvme.auth import NvmeAuthenticationError
from meshfusion.jbof.nvme.auth_keys import RandomBytes, Secret
from meshfusion.jbof.nvme.bring_up import AssociationInfo
from meshfusion.jbof.nvme.command import Command
from meshfusion.jbof.nvme.controller_effects import (
    NEXT_STATES,
    AssociationDead,
    AssociationEffect,
    AssociationLost,
    AssociationUp,
    Connected,
    ConnectionLost,
    ControllerEffect,
    ControllerLost,
    ControllerState,
    Disconnected,
    RequestEnded,
    RetryScheduled,
)
from meshfusion.jbof.nvme.inventory import Inventory
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.procedures import Procedure
from meshfusion.jbof.nvme.queue import QueuePair
from meshfusion.jbof.nvme.queue_effects import QueueLostError, SubmissionEffect
from meshfusion.jbof.nvme.reconnect import Reconnecting
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.transport import LinkEvent, ScratchPool

Effects = list[ControllerEffect]
_S = ControllerState


class Controller:
    """``random``: numbers from 0 to 1, for the jitter of reconnection. ``random_bytes``: for authentication.
    ``first_link``: links are numbered from there.

    The first attempt to connect is the only one when it fails. Later ones are repeated, also when the target refuses
    the host, for a target that starts may not know its hosts yet; the owner hears of every failure and may stop.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        scratch_pool: ScratchPool,
        random: Callable[[], float],
        random_bytes: RandomBytes,
        first_link: int,
    ) -> None:
        self.settings = settings
        self.state = _S.IDLE
        self._scratch_pool = scratch_pool
        self._random_bytes = random_bytes
        self._links = itertools.count(first_link)
        self._association: Association | None = None
        self._reconnecting = Reconnecting(
            settings.backoff_first_s, settings.backoff_max_s, settings.loss_timeout_s, random
        )
        self._retry_s = math.inf
        self._was_live = False
        self._cause: MeshFusionError = not_connected(settings.where)

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        return self.state is _S.LIVE

    @property
    def info(self) -> AssociationInfo | None:
        """None unless live. This and what follows may be read from any thread."""
        association = self._association
        return association.info if association is not None and self.is_live else None

    @property
    def inventory(self) -> Inventory:
        """Namespaces and how they are reached, as far as known; empty unless live."""
        association = self._association
        return association.inventory if association is not None and self.is_live else Inventory()

    @property
    def io_queues(self) -> list[QueuePair]:
        """For :meth:`submit_io`; empty unless live."""
        association = self._association
        return association.io_queues if association is not None and self.is_live else []

    def ana_state(self, nsid: int) -> AnaState | None:
        """None: the namespace is not reached here."""
        return self.inventory.ana_state(nsid)

    @property
    def next_deadline_s(self) -> float:
        """When :meth:`tick` has something to do; infinite if never."""
        times = [self._association.next_deadline_s if self._association is not None else math.inf]
        if self.state in (_S.CONNECTING, _S.WAITING):
            times.append(self._reconnecting.give_up_s)
        if self.state is _S.WAITING:
            times.append(self._retry_s)
        return min(times)

    # ---- asking --------------------------------------------------------------------------------------------------

    def connect(self, now_s: float) -> Effects:
        """Ends with :class:`Connected` or :class:`ControllerLost`."""
        self._reconnecting.lost(now_s)
        return self._attempt(now_s)

    def submit_io(
        self, now_s: float, queue: QueuePair, owner: object, command: Command, deadline_s: float
    ) -> list[SubmissionEffect]:
        """On one of :attr:`io_queues`. Ends as :mod:`meshfusion.jbof.nvme.queue` says."""
        assert self.is_live
        assert self._association is not None
        return self._association.submit_io(now_s, queue, owner, command, deadline_s)

    def request(self, now_s: float, owner: object, procedure: Procedure[Any]) -> Effects:
        """Hold a conversation on the admin queue, which ends with :class:`RequestEnded`."""
        if not self.is_live or self._association is None:
            return [RequestEnded(owner, None, not_connected(self.settings.where))]
        return self._absorb(now_s, self._association.request(now_s, owner, procedure))

    def use_key(self, now_s: float, host_key: Secret) -> Effects:
        """Prove the host with this key from the next association on; the one that is goes on. One that waits because
        its key was refused is tried with the new one at once."""
        self.settings = replace(self.settings, host_key=host_key)
        if self.state is _S.WAITING and isinstance(self._cause, NvmeAuthenticationError):
            self._retry_s = now_s
        return []

    def path_failed(self) -> None:
        """A command ended with a path error: look how namespaces are reached now."""
        if self._association is not None:
            self._association.path_failed()

    def disconnect(self, now_s: float, *, orderly: bool) -> Effects:
        """Ends with :class:`Disconnected`. Orderly, where it is live: within three times the shutdown timeout."""
        association = self._association
        if self.state in (_S.CLOSED, _S.CLOSING) or (self.state is _S.SHUTTING_DOWN and orderly):
            return []
        if association is None:
            self._move(_S.CLOSED)
            return [Disconnected(orderly=False)]
        if self.is_live and orderly:
            self._move(_S.SHUTTING_DOWN)
            return self._absorb(now_s, association.shut_down(now_s))
        self._move(_S.CLOSING)
        return self._absorb(now_s, association.kill(now_s, not_connected(self.settings.where)))

    # ---- events --------------------------------------------------------------------------------------------------

    def handle(self, now_s: float, event: LinkEvent) -> Effects:
        assert self._association is not None
        return self._absorb(now_s, self._association.handle(now_s, event))

    def tick(self, now_s: float) -> Effects:
        """Whatever is due at ``now_s``."""
        effects: Effects = []
        if self._association is not None:
            effects += self._absorb(now_s, self._association.tick(now_s))
        if now_s >= self._reconnecting.give_up_s and self.state in (_S.CONNECTING, _S.WAITING):
            effects += self._time_is_over(now_s)
        elif self.state is _S.WAITING and now_s >= self._retry_s:
            effects += self._attempt(now_s)
        return effects

    def _absorb(self, now_s: float, effects: Iterable[AssociationEffect]) -> Effects:
        kept: Effects = []
        for effect in effects:
            match effect:
                case AssociationUp(info):
                    self._move(_S.LIVE)
                    self._was_live = True
                    self._reconnecting.succeeded()
                    kept.append(Connected(info))
                case AssociationLost(error):
                    kept += self._on_lost(now_s, error)
                case AssociationDead(orderly):
                    kept += self._on_dead(now_s, orderly)
                case _:
                    kept.append(effect)
        return kept

    # ---- the states ----------------------------------------------------------------------------------------------

    def _move(self, state: ControllerState) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state} to {state}"
        self.state = state

    def _attempt(self, now_s: float) -> Effects:
        assert self._association is None, "one association at a time"
        self._move(_S.CONNECTING)
        self._association = Association(self.settings, self._scratch_pool, self._links, self._random_bytes)
        return self._absorb(now_s, self._association.begin(now_s))

    def _on_lost(self, now_s: float, error: MeshFusionError) -> Effects:
        self._cause = error
        match self.state:
            case _S.LIVE:
                self._reconnecting.lost(now_s)
                self._move(_S.LOSING)
                return [ConnectionLost(error)]
            case _S.CONNECTING:
                self._move(_S.LOSING)
            case _S.SHUTTING_DOWN:
                self._move(_S.CLOSING)
        return []

    def _on_dead(self, now_s: float, orderly: bool) -> Effects:
        self._association = None
        if self.state is _S.CLOSING:
            self._move(_S.CLOSED)
            return [Disconnected(orderly)]
        hopeless = isinstance(self._cause, UnsupportedError | ConfigError)
        if not self._was_live or hopeless or now_s >= self._reconnecting.give_up_s:
            return self._give_up()
        self._move(_S.WAITING)
        self._retry_s = self._reconnecting.next_attempt_s(now_s)
        return [RetryScheduled(self._cause, self._retry_s)]

    def _time_is_over(self, now_s: float) -> Effects:
        if self.state is _S.WAITING:
            return self._give_up()
        assert self._association is not None
        error = MediaError(
            f"{self.settings.where}: not connected within {self.settings.loss_timeout_s:g} s",
            next_step="Check that the target runs and can be reached, and connect again.",
        )
        return self._absorb(now_s, self._association.kill(now_s, error))

    def _give_up(self) -> Effects:
        self._move(_S.LOST)
        return [ControllerLost(self._cause)]


def not_connected(where: str) -> QueueLostError:
    """The error for what cannot be done without a connection."""
    return QueueLostError(
        f"{where} is not connected", next_step="Nothing, if it reconnects; otherwise see why the connection was lost."
    )
