"""The connections of all paths: opened together, those that are not there in the background, and closed together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from meshfusion.host.path.flexpath.link import CurrentKey, Link, PathInitiator, PathSpec, check_descriptors
from meshfusion.host.path.flexpath.regions import SharedRegion
from meshfusion.host.path.flexpath.requests import NoPathError
from meshfusion.jbof.errors import MeshFusionError
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.controller_effects import ControllerEvent
from meshfusion.jbof.nvme.registration import MemoryRange

logger = logging.getLogger("meshfusion.path")


class Links:
    """``on_event`` is called on threads of initiators and must not wait; ``on_joined`` when a path can be used.

    ``wait_until_unused`` returns when nobody uses an initiator any more that :meth:`initiator` does not tell. ``key``:
    what ``paths`` open with.
    """

    def __init__(
        self,
        paths: Sequence[PathSpec],
        on_event: Callable[[int, ControllerEvent], None],
        on_joined: Callable[[int], None],
        wait_until_unused: Callable[[], None],
        *,
        retry_s: float,
        key: CurrentKey,
    ) -> None:
        self._key = key
        self._links = [Link(path, spec, on_event) for path, spec in enumerate(paths)]
        self._on_joined = on_joined
        self._wait_until_unused = wait_until_unused
        self._retry_s = retry_s
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of regions, and of who is there
        self._regions: list[SharedRegion] = []
        self.max_descriptors = 0

    def open(self) -> None:
        """Raises :class:`NoPathError` if no path can be opened now."""
        opened = self._open_all()
        if not opened:
            reasons = "; ".join(f"{link.name}: {link.error.message}" for link in self._links if link.error is not None)
            raise NoPathError(
                f"none of {len(self._links)} paths can be opened ({reasons})",
                next_step="Check targets, ports and addresses.",
            )
        self.max_descriptors = min(initiator.max_descriptors for initiator in opened.values())
        for link in self._links:
            if link in opened:
                self._join(link, opened[link])
        threading.Thread(target=self._retry_loop, name="flexpath-join", daemon=True).start()

    def name(self, path: int) -> str:
        return self._links[path].name

    def last_error(self, path: int) -> str:
        """Empty: nothing went wrong so far."""
        return self._links[path].last_error

    def note(self, path: int, error: MeshFusionError) -> None:
        """Something went wrong there."""
        self._links[path].last_error = error.message

    def initiator(self, path: int) -> PathInitiator | None:
        """None: there is no connection, and will be none soon."""
        return self._links[path].initiator

    def give_up(self, path: int) -> None:
        """Its initiator does not try any more: another one will be opened."""
        self._links[path].is_given_up = True

    def use_key(self, host_key: Secret) -> None:
        """For what connects from now on, also of paths that are there. Waits for nobody."""
        self._key.secret = host_key  # first: who joins meanwhile takes it from there
        for link in self._links:
            if (initiator := link.initiator) is not None:
                initiator.use_key(host_key)

    def register(self, memory: MemoryRange, *, writable: bool, owner: object) -> SharedRegion:
        """With every path, also those to come. Raises what one that is there raises; none can reach it then."""
        region = SharedRegion(memory, writable=writable, owner=owner, forget=self._forget)
        try:
            with self._lock:
                for link in self._links:
                    if link.initiator is not None:
                        link.register(link.initiator, [region])
                self._regions.append(region)
        except MeshFusionError:
            region.close()
            raise
        return region

    def _forget(self, region: SharedRegion) -> None:
        with self._lock:
            if region in self._regions:
                self._regions.remove(region)

    def close(self, *, timeout_s: float) -> None:
        """All at once; again is no error. Raises the first error when all have ended."""
        self._closing.set()
        with self._lock:
            initiators = [link.initiator for link in self._links if link.initiator is not None]
        errors: list[MeshFusionError] = []

        def close_one(initiator: PathInitiator) -> None:
            try:
                initiator.close(timeout_s=timeout_s)
            except MeshFusionError as error:
                errors.append(error)

        threads = [threading.Thread(target=close_one, args=(initiator,), daemon=True) for initiator in initiators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    # ---- joining -------------------------------------------------------------------------------------------------

    def _open_all(self) -> dict[Link, PathInitiator]:
        opened: dict[Link, PathInitiator] = {}

        def open_one(link: Link) -> None:
            initiator = link.open()
            if initiator is not None:
                opened[link] = initiator

        threads = [threading.Thread(target=open_one, args=(link,), daemon=True) for link in self._links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return opened

    def _join(self, link: Link, initiator: PathInitiator) -> None:
        """It can be used once all memory is registered with it."""
        try:
            check_descriptors(link, initiator, self.max_descriptors)
            with self._lock:
                link.register(initiator, self._regions)
                if self._closing.is_set():
                    raise NoPathError("the paths are closed", next_step="Nothing, if the engine is shutting down.")
                link.initiator, link.error, link.is_given_up = initiator, None, False
            if self._key.secret is not None:
                initiator.use_key(self._key.secret)  # it may have begun with the one before
        except MeshFusionError as error:
            link.failed(error)
            _close(link, initiator)
            return
        self._on_joined(link.path)

    def _retry_loop(self) -> None:
        while not self._closing.wait(self._retry_s):
            for link in self._links:
                if self._closing.is_set():
                    return
                self._retry(link)

    def _retry(self, link: Link) -> None:
        if link.is_given_up:
            with self._lock:
                given_up, link.initiator, link.is_given_up = link.initiator, None, False
            if given_up is not None:
                self._wait_until_unused()
                _close(link, given_up)
        if link.initiator is None:
            initiator = link.open()
            if initiator is not None:
                self._join(link, initiator)


def _close(link: Link, initiator: PathInitiator) -> None:
    try:
        initiator.close(timeout_s=0.0)
    except MeshFusionError:
        logger.exception("path %s: queue pairs are left that may still reach the engine's memory", link.name)
