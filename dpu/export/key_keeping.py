"""A host's key on its way: from its file to the target, and from there to the host. In this order:

1. a new key is durable in its file,
2. the target asks for it, as for everything else that is desired,
3. the host is told, with its heartbeats, which key its target asks for; never one that it does not ask for yet.

Whatever ends in between, the newest file, what the target reports and what the host says of its key tell what is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from meshfusion.dpu.api.service_types import KeyChange
from meshfusion.dpu.export.key_rotation import KeyRotation, ServedKey
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.jbof.errors import MeshFusionError, UnsupportedError
from meshfusion.jbof.nvme.auth_keys import key_id

logger = logging.getLogger("meshfusion.exports")


class KeyKeeping:
    """:meth:`renew` and :meth:`found` belong to the thread that has the target, the rest to any. ``keys``: None: hosts
    have none. ``clock``: seconds that nobody sets; ``wall_clock``: seconds since 1970, which people set."""

    def __init__(
        self,
        keys: HostKeys | None,
        lifetime_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys, self._clock, self._wall_clock = keys, clock, wall_clock
        self._change = threading.Condition()
        self._rotation = KeyRotation(lifetime_s)
        self._there: dict[str, str] = {}  # by incarnation, the id of the key that its target asked for when last read
        self._is_closing = False

    # ---- in a round ----------------------------------------------------------------------------------------------

    def renew(self, served: Iterable[str]) -> None:
        """Those that are due, in their files; their target gets them with the rest of what is desired."""
        if self._keys is None:
            return
        now_s, wall_s = self._clock(), self._wall_clock()
        keys = {incarnation: self._served_key(self._keys, incarnation, wall_s) for incarnation in served}
        with self._change:
            due = self._rotation.due(now_s, keys)
        for incarnation in due:
            try:
                self._keys.replace(incarnation)
            except MeshFusionError as error:
                logger.warning("the key of holder %s was not replaced: %s", incarnation, error)
                outcome = self._rotation.failed
            else:
                logger.info("holder %s is given a new key", incarnation)
                outcome = self._rotation.replaced
            with self._change:
                outcome(now_s, incarnation)
                self._change.notify_all()

    def _served_key(self, keys: HostKeys, incarnation: str, wall_s: float) -> ServedKey:
        wanted_id = keys.wanted(incarnation).id
        is_there = bool(wanted_id) and self._there.get(incarnation) == wanted_id
        return ServedKey(wanted_id, is_there, keys.age_s(incarnation, wall_s))

    def found(self, there: Mapping[str, str]) -> None:
        """Which key the target asks each of those who are served for; empty: none, or it does not let it in."""
        if self._keys is None:
            return
        for incarnation, there_id in there.items():  # first: whoever waits for a new key finds no former one
            self._keys.is_there(incarnation, there_id)
        with self._change:
            self._there = dict(there)
            self._change.notify_all()

    # ---- hosts and people ----------------------------------------------------------------------------------------

    def there_id(self, incarnation: str) -> str:
        """Of the key that its target asks for; empty: of none."""
        with self._change:
            return self._there.get(incarnation, "")

    def hear(self, incarnation: str, known_id: str) -> str:
        """It says which key it has; empty: nothing, as engines of earlier releases. Returns the key that its target
        asks for, as text, when that is another one, else nothing."""
        if self._keys is None or not known_id:
            return ""
        with self._change:
            if self._rotation.known_by(incarnation) != known_id:
                self._rotation.heard(incarnation, known_id)
                self._change.notify_all()
            there_id = self._there.get(incarnation, "")
        if there_id in ("", known_id):
            return ""
        try:
            text = self._keys.read(incarnation, there_id)
        except MeshFusionError as error:
            logger.warning("holder %s cannot be told its new key: %s", incarnation, error.message)
            return ""
        return text if key_id(text) == there_id else ""

    def replace(
        self, incarnations: Collection[str], wake: Callable[[], None], *, deadline_s: float
    ) -> dict[str, KeyChange]:
        """Give each of these a new key, without ending a connection, and say how far that is when all have got it or
        the deadline comes. What is left goes on by itself. ``wake``: for another round. Raises UnsupportedError where
        hosts have no keys."""
        keys = self._keys
        if keys is None:
            raise UnsupportedError(
                "hosts have no keys here: exports.authenticate is off", next_step="set exports.authenticate: true"
            )
        with self._change:
            for incarnation in incarnations:
                self._rotation.ask(incarnation)
        wake()
        with self._change:
            self._change.wait_for(
                lambda: self._is_closing or all(self._how_far(keys, one) is KeyChange.DONE for one in incarnations),
                deadline_s,
            )
            return {incarnation: self._how_far(keys, incarnation) for incarnation in incarnations}

    def _how_far(self, keys: HostKeys, incarnation: str) -> KeyChange:
        """Under _change, of one that was asked for."""
        known_id, wanted_id = self._rotation.known_by(incarnation), keys.wanted(incarnation).id
        if not known_id:
            return KeyChange.UNABLE
        if self._rotation.is_asked(incarnation) and self._rotation.has_failed(incarnation):
            return KeyChange.NOT_WRITTEN
        if self._rotation.is_asked(incarnation) or self._there.get(incarnation) != wanted_id:
            return KeyChange.TARGET_LACKS_IT
        return KeyChange.DONE if known_id == wanted_id else KeyChange.HOST_LACKS_IT

    def close(self) -> None:
        """Nobody waits any more."""
        with self._change:
            self._is_closing = True
            self._change.notify_all()
