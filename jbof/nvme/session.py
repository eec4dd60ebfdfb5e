"""A controller and the transfers over it as one machine: link events in, effects out. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from meshfusion.jbof.nvme.association import MAX_CONVERSATIONS
from meshfusion.jbof.nvme.auth_keys import RandomBytes, Secret
from meshfusion.jbof.nvme.controller import Controller
from meshfusion.jbof.nvme.procedures import Procedure
from meshfusion.jbof.nvme.settings import ControllerSettings
from meshfusion.jbof.nvme.transfer_effects import SessionEffect
from meshfusion.jbof.nvme.transfer_requests import Request
from meshfusion.jbof.nvme.transfers import Transfers
from meshfusion.jbof.nvme.transport import LinkEvent, ScratchPool

Effects = list[SessionEffect]
MIN_ADMIN_SCRATCH: Final = MAX_CONVERSATIONS + 2


class Session:
    """``admin_scratch`` and ``range_scratch`` are pools of their own, so that transfers cannot starve the upkeep.

    The first has at least ``MIN_ADMIN_SCRATCH`` pieces. ``random`` and ``random_bytes``: see
    :class:`~meshfusion.jbof.nvme.controller.Controller`.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        admin_scratch: ScratchPool,
        range_scratch: ScratchPool,
        random: Callable[[], float],
        random_bytes: RandomBytes,
        *,
        max_transfers: int = 4096,
        first_link: int = 1,
    ) -> None:
        self.controller = Controller(settings, admin_scratch, random, random_bytes, first_link)
        self.transfers = Transfers(self.controller, range_scratch, max_transfers=max_transfers)

    @property
    def next_deadline_s(self) -> float:
        """When :meth:`tick` has something to do; infinite if never."""
        return min(self.controller.next_deadline_s, self.transfers.next_deadline_s)

    def connect(self, now_s: float) -> Effects:
        return self.transfers.handle(now_s, self.controller.connect(now_s))

    def disconnect(self, now_s: float, *, orderly: bool) -> Effects:
        return self.transfers.handle(now_s, self.controller.disconnect(now_s, orderly=orderly))

    def use_key(self, now_s: float, host_key: Secret) -> Effects:
        return self.transfers.handle(now_s, self.controller.use_key(now_s, host_key))

    def request(self, now_s: float, owner: object, procedure: Procedure[Any]) -> Effects:
        return self.transfers.handle(now_s, self.controller.request(now_s, owner, procedure))

    def begin(self, now_s: float, owner: object, request: Request, deadline_s: float) -> Effects:
        return self.transfers.begin(now_s, owner, request, deadline_s)

    def handle(self, now_s: float, event: LinkEvent) -> Effects:
        return self.transfers.handle(now_s, self.controller.handle(now_s, event))

    def tick(self, now_s: float) -> Effects:
        effects = self.transfers.handle(now_s, self.controller.tick(now_s))
        return effects + self.transfers.tick(now_s)
