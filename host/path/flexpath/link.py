"""One path's connection: its initiator, opened anew when it was given up, and the memory registered with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshfusion.host.path.flexpath.regions import SharedRegion
from meshfusion.host.path.rdma import NamespaceInitiator
from meshfusion.jbof.errors import MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.controller_effects import ControllerEvent
from meshfusion.jbof.nvme.inventory import Inventory
from meshfusion.jbof.nvme.memory import RegisteredRegion
from meshfusion.jbof.nvme.registration import AddressRange, DmaBufRange

logger = logging.getLogger("meshfusion.path")

OnEvent = Callable[[ControllerEvent], None]


class PathInitiator(NamespaceInitiator, Protocol):
    """What is used of :class:`~meshfusion.jbof.nvme.initiator.Initiator`."""

    @property
    def inventory(self) -> Inventory: ...

    def use_key(self, host_key: Secret) -> None: ...


@dataclass(slots=True, eq=False)
class CurrentKey:
    """With which this host authenticates itself now, None: with none. Read by whoever connects, on any thread."""

    secret: Secret | None = None


class PathSpec(NamedTuple):
    """``open`` connects, tells events to its argument from then on, and raises MeshFusionError when it cannot.

    ``weight``: how much worse its way to the memory is than the best one, at least 1 (see
    :func:`~meshfusion.host.path.flexpath.locality.gpu_distance`). ``name``: for people.
    """

    name: str
    open: Callable[[OnEvent], PathInitiator]
    weight: float = 1.0


class Link:
    """``initiator`` is None while there is none, and ``error`` says why. ``is_given_up``: it will not reconnect.
    ``last_error``: what went wrong here last, for people."""

    def __init__(self, path: int, spec: PathSpec, on_event: Callable[[int, ControllerEvent], None]) -> None:
        self.path = path
        self.name = spec.name
        self.initiator: PathInitiator | None = None
        self.error: MeshFusionError | None = None
        self.last_error = ""
        self.is_given_up = False
        self._spec = spec
        self._on_event = on_event

    def open(self) -> PathInitiator | None:
        """A new initiator, or None: it cannot be had now."""
        try:
            return self._spec.open(lambda event: self._on_event(self.path, event))
        except MeshFusionError as error:
            self.failed(error)
            return None

    def failed(self, error: MeshFusionError) -> None:
        if self.error is None or self.error.message != error.message:  # once, not at every attempt
            logger.warning("path %s is not there: %s", self.name, error)
        self.error = error
        self.last_error = error.message

    def register(self, initiator: PathInitiator, regions: Iterable[SharedRegion]) -> None:
        """Raises what registering raises."""
        for region in regions:
            region.put(self.path, _register(initiator, region))


def _register(initiator: PathInitiator, region: SharedRegion) -> RegisteredRegion:
    writable, owner = region.writable, region.memory_owner
    match region.memory:
        case AddressRange(address, length_bytes):
            return initiator.register_address(address, length_bytes, writable=writable, owner=owner)
        case DmaBufRange() as memory:
            return initiator.register_dma_buf(memory, writable=writable, owner=owner)


def check_descriptors(link: Link, initiator: PathInitiator, needed: int) -> None:
    """Callers were promised that commands may have ``needed`` pieces of memory, on every path."""
    if initiator.max_descriptors < needed:
        raise UnsupportedError(
            f"{link.name} takes {initiator.max_descriptors} pieces of memory a command, and the other paths {needed}",
            next_step="Give all paths the same kind of target, or start again with this path present.",
        )
