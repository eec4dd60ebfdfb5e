"""The worker's path to the pool: in use, being opened, or ending. Nothing here waits: the engine's thread calls it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Final

from meshfusion.dpu.api.types import Attachment, Reached
from meshfusion.host.connector.path_gate import PathState
from meshfusion.host.path.data_path import DataPath
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.worker")

RETRY_S: Final = 5.0
"""A target, or the service's machine, may be back by then."""
FINISH_S: Final = 10.0
"""What a former path has under way may take this long to end by itself."""


class _Opening:
    """A path being opened on a thread of its own: ``result`` when that has ended."""

    def __init__(self, attachment: Attachment, open_path: Callable[[Attachment], DataPath]) -> None:
        self.attachment = attachment
        self.result: DataPath | MeshFusionError | None = None
        self._open_path = open_path
        threading.Thread(target=self._run, name="meshfusion-open", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._open_path(self.attachment)
        except MeshFusionError as error:
            self.result = error
        except Exception as error:  # a bug must cost the cache, not leave loads waiting
            logger.exception("opening a path failed")
            self.result = MeshFusionError(f"opening a path failed: {error!r}", next_step="report this as a bug")


class PathSlot:
    """Follows attachments: each is a new incarnation, which writes only over a path opened for it."""

    def __init__(self, open_path: Callable[[Attachment], DataPath]) -> None:
        self._open_path = open_path
        self._path: DataPath | None = None
        self._attachment: Attachment | None = None
        self._opening: _Opening | None = None
        self._ending: list[threading.Thread] = []
        self._retry_from_s = 0.0
        self._following: _Opening | None = None  # the drives of a target, over the path that is in use
        self._followed = 0  # the drives' version that was tried last
        self._follow_from_s = 0.0  # when it is tried again
        self._told = ""
        self._reached: Reached | None = None  # as it was told last
        self._change: PathState | None = None

    @property
    def path(self) -> DataPath | None:
        """To read over: what an earlier incarnation opened to the same pool serves until the next is open."""
        return self._path

    def path_to(self, attachment: Attachment | None) -> DataPath | None:
        """:attr:`path`, unless it leads to another pool: to one that is being written still, while the service speaks
        of the next."""
        mine = self._attachment
        return self._path if attachment is None or mine is None or mine.pool_uuid == attachment.pool_uuid else None

    def is_opening_to(self, attachment: Attachment | None) -> bool:
        """Is a path to this pool being opened?"""
        opening = self._opening
        return opening is not None and (attachment is None or opening.attachment.pool_uuid == attachment.pool_uuid)

    def reaches(self, namespaces: AbstractSet[int]) -> bool:
        """Does :attr:`path` lead to all of these, as far as the service told when it was opened?"""
        mine = self._attachment
        return mine is not None and namespaces <= {namespace.nsid for namespace in mine.namespaces}

    @property
    def attachment(self) -> Attachment | None:
        """For which :attr:`path` was opened; only its grants may be written under."""
        return self._attachment

    @property
    def opening_holder_id(self) -> str:
        """For whom a path is being opened; empty when none is."""
        return self._opening.attachment.holder_id if self._opening is not None else ""

    def follow(self, attachment: Attachment | None, *, is_writing: bool) -> None:
        """``is_writing``: under the former attachment; its path stays until that has ended."""
        if attachment is not None:
            self._take_key(attachment)
        if attachment is None or self._opening is not None:
            return
        former = self._attachment
        is_alike = former is not None and is_reached_alike(former, attachment)
        if former is not None and former.holder_id == attachment.holder_id and is_alike:
            self._follow_drives(attachment)
            return
        if is_writing:
            return
        if former is not None and is_alike and _is_same_data(former, attachment):
            self._attachment = attachment
            self._change = PathState(attachment.holder_id)
            return
        if former is not None and former.pool_uuid != attachment.pool_uuid:
            self._leave_pool()
        if time.monotonic() >= self._retry_from_s:
            self._opening = _Opening(attachment, self._open_path)

    def _take_key(self, attachment: Attachment) -> None:
        """The same incarnation may be given another key, also while it writes: its path needs it to connect again."""
        mine = self._attachment
        if mine is None or mine.holder_id != attachment.holder_id or mine.export == attachment.export:
            return
        export = attachment.export
        if self._path is not None and export is not None and export.host_key:
            try:
                self._path.take_key(export.host_key)
            except MeshFusionError as error:  # the path goes on, with the key that it has
                logger.error("a new key is of no use: %s", error.message)
        self._attachment = replace(mine, export=export)

    def _follow_drives(self, attachment: Attachment) -> None:
        """Of a target: those that have come are proven over the path that is in use, those that have gone are left.
        What could not be proven is tried again."""
        path, former = self._path, self._attachment
        drives = None if path is None else path.exported
        if path is None or drives is None or former is None or self._following is not None:
            return
        is_as_told = former.drives_version == attachment.drives_version
        if is_as_told and drives.nsids >= {namespace.nsid for namespace in attachment.namespaces}:
            return
        if attachment.drives_version != self._followed or time.monotonic() >= self._follow_from_s:
            self._followed = attachment.drives_version
            self._following = _Opening(attachment, partial(_reach, path))

    def _advance_drives(self) -> None:
        """Nothing waits for that: places are granted, and chunks offered, on the drives that were told."""
        following = self._following
        if following is None or following.result is None or self._change is not None:
            return
        self._following = None
        self._follow_from_s = time.monotonic() + RETRY_S
        if isinstance(following.result, MeshFusionError):
            logger.error("none of the pool's drives is reached as it is now: %s", following.result)
        elif following.result is self._path:
            former, now_told = self._attachment, following.attachment
            # A key that came meanwhile stays.
            self._attachment = now_told if former is None else replace(now_told, export=former.export)
            now = _state_of(following.result, following.attachment)
            has_changed = former is None or former.drives_version != following.attachment.drives_version
            if has_changed or now.reached != self._reached:
                self._change, self._reached = now, now.reached

    def advance(self) -> bool:
        """Has an opening ended, well or not? Then what waited for it can be decided."""
        self._advance_drives()
        opening = self._opening
        if opening is None or opening.result is None:
            return False
        self._opening = None
        if isinstance(opening.result, MeshFusionError):
            self._retry_from_s = time.monotonic() + RETRY_S
            message = str(opening.result)
            if message != self._told:  # once, not at every attempt
                logger.error("the pool is out of this worker's reach, nothing is saved or loaded: %s", message)
            self._told = message
            # Also while a former path is there: its incarnation has fallen silent, and is cut off soon.
            self._change = PathState(opening.attachment.holder_id, message)
            return True
        self._told = ""
        self._change = _state_of(opening.result, opening.attachment)
        self._reached = self._change.reached
        self._followed, self._follow_from_s = opening.attachment.drives_version, time.monotonic() + RETRY_S
        former, self._path, self._attachment = self._path, opening.result, opening.attachment
        if former is not None:
            self._end(former)
        return True

    def take_change(self) -> PathState | None:
        """How things stand with the path, if that has changed since the last call."""
        change, self._change = self._change, None
        return change

    def close(self, *, deadline_s: float) -> bool:
        """End every path. True when nothing is under way any more on any of them."""
        end_s = time.monotonic() + deadline_s
        opening, self._opening = self._opening, None
        if opening is not None:  # it is closed when it is there; nobody will have used it
            threading.Thread(target=_close_late, args=(opening,), name="meshfusion-open", daemon=True).start()
        path, self._path, self._attachment = self._path, None, None
        is_quiet = path.close(deadline_s=deadline_s) if path is not None else True
        for thread in self._ending:
            thread.join(max(0.0, end_s - time.monotonic()))
            is_quiet = is_quiet and not thread.is_alive()
        return is_quiet

    def _leave_pool(self) -> None:
        """What the service tells from here on lies in another one: there, these bytes would be taken for damage, and
        chunks that are well would be dropped."""
        former, self._path, self._attachment = self._path, None, None
        if former is not None:
            self._end(former)

    def _end(self, path: DataPath) -> None:
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        thread = threading.Thread(
            target=path.finish, kwargs={"deadline_s": FINISH_S}, name="meshfusion-finish", daemon=True
        )
        thread.start()
        self._ending.append(thread)


def is_reached_alike(one: Attachment, other: Attachment) -> bool:
    """May what was opened for one go on for the other? Else a drive has come, or lies elsewhere. Of an export, drives
    come to the path that is in use."""
    return one.export is not None or one.drives_version == other.drives_version


def _reach(path: DataPath, attachment: Attachment) -> DataPath:
    assert path.exported is not None
    path.exported.reach(attachment)
    return path


def _state_of(path: DataPath, attachment: Attachment) -> PathState:
    if path.exported is None:
        return PathState(attachment.holder_id)
    nsids = tuple(sorted(path.exported.nsids))
    return PathState(attachment.holder_id, reached=Reached(attachment.drives_version, nsids))


def _is_same_data(one: Attachment, other: Attachment) -> bool:
    """Opened here, and the same pool: then the open files serve the new incarnation too."""
    return one.pool_uuid == other.pool_uuid and one.export is None and other.export is None


def _close_late(opening: _Opening) -> None:
    while opening.result is None:
        time.sleep(0.05)
    if isinstance(opening.result, DataPath):
        opening.result.close()
