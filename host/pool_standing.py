"""Our place at the chunk service: attached, kept by heartbeats, and attached anew when it was lost (rule 9).

Each attachment is a new incarnation: an earlier one may have writes of unknown fate and is never readmitted (rule 3).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.host.pool_events import Attached, AttachmentLost, Event, LeasesLost
from meshfusion.jbof.errors import (
    MeshFusionError,
    PermissionDeniedError,
    ServiceDrainingError,
    ServiceUnavailableError,
    StaleHolderError,
    UnauthenticatedError,
)
from meshfusion.jbof.nvme.auth_keys import key_id, parse_secret

logger = logging.getLogger("meshfusion.client")

T = TypeVar("T")

ATTACH_DEADLINE_S = 10.0
HEARTBEAT_DEADLINE_S = 2.0
_MAY_FAIL = ("match", "drives")
REATTACH_FIRST_S = 0.2
REATTACH_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Under which identity an attachment was made. ``is_ending``: the service is about to stop. What is open goes on to
    its end; nothing new is asked for, and lookups are misses."""

    attachment: api.Attachment
    identity: bytes
    is_ending: bool = False


class PoolStanding:
    """Keeps one holder attached, on a thread of its own: an engine with all its workers, ``rank_count`` of them.

    ``tell`` gets :class:`Attached`, :class:`AttachmentLost` and :class:`LeasesLost`; it must not block.
    """

    def __init__(
        self,
        service: api.ChunkService,
        *,
        identity: bytes,
        engine_version: str,
        rank_count: int,
        access: api.Access,
        tell: Callable[[Event | AttachmentLost], None],
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self._service = service
        self._identity = identity
        self._engine_version = engine_version
        self._rank_count = rank_count
        self._access = access
        self._tenant = tenant
        self._tell = tell
        self._change = threading.Lock()  # of identity, standing and liveness; never held while anything blocks
        self._current: Standing | None = None
        self._request: api.AttachRequest | None = None  # with which it was made
        self._liveness: int | None = None
        self._lease_ids: tuple[str, ...] = ()
        self._reached: tuple[str, api.Reached] | None = None  # as whom
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._keep_attached, name="meshfusion-attach", daemon=True)

    @property
    def current(self) -> Standing | None:
        """None while the service is away."""
        return self._current

    @property
    def asking(self) -> Standing | None:
        """As whom something new may be asked for; None while the service is away or about to be."""
        standing = self._current
        return None if standing is None or standing.is_ending else standing

    def start(self) -> api.Attachment:
        """Attach for the first time, on the caller's thread: trouble here is the engine's to hear about."""
        attachment = self._attach()
        assert attachment is not None, "closed, or given another identity, before it was started"
        self._thread.start()
        return attachment

    def attach_as(self, identity: bytes) -> None:
        """Leave the current attachment and attach under another identity, in the background."""
        with self._change:
            self._identity = identity
            self._current = None
            self._lost.set()

    def attach_anew(self, holder_id: str) -> None:
        """Attach as another incarnation than this one, in the background; unless that has happened already."""
        with self._change:
            if self._current is not None and self._current.attachment.holder_id == holder_id:
                self._current = None
                self._lost.set()

    def set_leases(self, lease_ids: tuple[str, ...]) -> None:
        """The leases to keep alive."""
        self._lease_ids = lease_ids

    def set_reached(self, holder_id: str, reached: api.Reached) -> None:
        """Which drives all workers reach as this incarnation."""
        self._reached = holder_id, reached

    def stop(self) -> None:
        """Attach no more; what is attached stays so."""
        with self._change:
            self._stop.set()
            self._lost.set()

    def leave(self, *, patience_s: float) -> None:
        """Detach and give the liveness lock back. Callers make sure that no worker is writing any more."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(patience_s)
        with self._change:
            standing, self._current = self._current, None
            descriptor, self._liveness = self._liveness, None
        if descriptor is not None:
            os.close(descriptor)
        if standing is not None:
            self._detach(standing.attachment.holder_id)

    def ask(self, what: str, holder_id: str, call: Callable[[], T]) -> T | None:
        """The answer, or None after trouble; losing the service or our place in it starts a new attachment.

        ``holder_id``: as whom; trouble of an earlier incarnation says nothing about the current one.
        """
        try:
            return call()
        except ServiceDrainingError as error:
            # Our place there is kept: leases are still given back, and what was written can be committed.
            self._service_drains(holder_id)
            logger.info("%s: %s", what, error.message)
        except (StaleHolderError, UnauthenticatedError, PermissionDeniedError) as error:
            # The latter two: the service knows us by another name or not at all, and would refuse all that follows.
            self._lose_attachment(what, holder_id, error)
        except ServiceUnavailableError as error:
            # A lookup that was merely slow is no reason to let go, nor are drives that the target does not show yet; a
            # heartbeat that fails is.
            if what not in _MAY_FAIL:
                self._lose_attachment(what, holder_id, error)
            else:
                logger.info("asking for %s failed: %s", what, error.message)
        except MeshFusionError as error:
            logger.warning("%s refused by the chunk service: %s", what, error)
        except Exception:  # a bug in the service, when it lives in this process, must not end our threads
            logger.exception("%s failed", what)
        return None

    def _lose_attachment(self, what: str, holder_id: str, error: MeshFusionError) -> None:
        with self._change:
            standing = self._current
            is_current = standing is not None and standing.attachment.holder_id == holder_id
            if is_current:
                self._current = None
                self._tell(AttachmentLost())
                self._lost.set()
        if is_current:
            logger.warning("lost the chunk service during %s: %s", what, error.message)
        else:
            logger.info("%s failed: %s", what, error.message)

    def _service_drains(self, holder_id: str) -> None:
        with self._change:
            standing = self._current
            is_news = standing is not None and standing.attachment.holder_id == holder_id and not standing.is_ending
            if standing is not None and is_news:
                self._current = replace(standing, is_ending=True)
        if is_news:
            logger.warning("the chunk service is about to stop: nothing new is looked up or saved until it is back")

    def _keep_attached(self) -> None:
        """Heartbeats while attached; attaching again, with patience, when not."""
        retry_s = REATTACH_FIRST_S
        while not self._stop.is_set():
            standing = self._current
            if standing is not None:
                self._lost.wait(standing.attachment.heartbeat_s)
                current = self._current  # another, where it was told only that the service drains, or of its drives
                is_same = current is not None and current.attachment.holder_id == standing.attachment.holder_id
                if current is not None and is_same and not self._stop.is_set():
                    self._heartbeat(current.attachment)
                    self._say_new_key(current.attachment)
                continue
            if self._stop.wait(retry_s):
                return
            retry_s = min(REATTACH_MAX_S, retry_s * 2)
            if self.ask("attach", "", self._attach) is not None:
                logger.warning("attached to the chunk service again")
                retry_s = REATTACH_FIRST_S

    def _attach(self) -> api.Attachment | None:
        """As a new incarnation each time: an earlier one may have writes of unknown fate and is never readmitted.

        None when the identity changed or the client was closed meanwhile.
        """
        identity = self._identity
        request = api.AttachRequest(
            incarnation=uuid.uuid4().hex,
            engine_kind="vllm",
            engine_version=self._engine_version,
            host=socket.gethostname(),
            pid=os.getpid(),
            identity=identity,
            rank_count=self._rank_count,
            tenant=self._tenant,
            access=self._access,
        )
        attachment = self._service.attach(request, deadline_s=ATTACH_DEADLINE_S)
        try:
            descriptor = self._hold(attachment)
        except MeshFusionError:
            self._detach(attachment.holder_id)
            raise
        with self._change:
            if identity == self._identity and not self._stop.is_set():
                # The former incarnation may be fenced now: a worker that still writes as it holds its lock itself, and
                # an idle engine must not keep the service from reclaiming until somebody asks it something.
                former, self._liveness = self._liveness, descriptor
                if former is not None:
                    os.close(former)
                self._current = Standing(attachment, identity)
                self._request = request
                self._lost.clear()
                self._tell(Attached(attachment))
                return attachment
        if descriptor is not None:
            os.close(descriptor)
        self._detach(attachment.holder_id)  # nobody has used it
        return None

    def _hold(self, attachment: api.Attachment) -> int | None:
        """The liveness lock, with local access; else the target knows who lives."""
        return hold_liveness(Path(attachment.liveness_path)) if attachment.liveness_path else None

    def _detach(self, holder_id: str) -> None:
        request = api.DetachRequest(holder_id)
        try:
            self._service.detach(request, deadline_s=2.0)
        except Exception as error:
            logger.info("detaching failed, the service will fence %s by itself: %s", holder_id, error)

    def _heartbeat(self, attachment: api.Attachment) -> None:
        holder_id = attachment.holder_id
        told = self._reached
        reached = told[1] if told is not None and told[0] == holder_id else None
        request = api.HeartbeatRequest(holder_id, attachment.epoch, self._lease_ids, reached, _host_key_id(attachment))
        reply = self.ask(
            "heartbeat", holder_id, lambda: self._service.heartbeat(request, deadline_s=HEARTBEAT_DEADLINE_S)
        )
        if reply is not None and reply.lost_lease_ids:
            self._tell(LeasesLost(reply.lost_lease_ids))
        if reply is not None and reply.is_draining:
            self._service_drains(holder_id)
        if reply is not None and reply.host_key:
            self._take_key(holder_id, reply.host_key)
        if reply is not None and reply.is_draining:
            return
        if reply is not None and reply.drives_version != attachment.drives_version:
            self.ask("drives", holder_id, lambda: self._ask_for_drives(holder_id))

    def _take_key(self, holder_id: str, host_key: str) -> None:
        """The target asks for another key from the next connection on."""
        try:
            parse_secret(host_key)
        except MeshFusionError as error:
            logger.warning("the chunk service sent a new key that is none: %s", error.message)
            return
        with self._change:
            standing = self._current
            if standing is None or standing.attachment.holder_id != holder_id or standing.attachment.export is None:
                return
            export = replace(standing.attachment.export, host_key=host_key)
            self._current = replace(standing, attachment=replace(standing.attachment, export=export))
        logger.info("the chunk service gave %s a new key for its connections", holder_id)

    def _say_new_key(self, before: api.Attachment) -> None:
        """At once, not with the next heartbeat: people may wait for it."""
        standing = self._current
        if standing is None or standing.attachment.holder_id != before.holder_id:
            return
        if _host_key_id(standing.attachment) != _host_key_id(before):
            self._heartbeat(standing.attachment)

    def _ask_for_drives(self, holder_id: str) -> None:
        """The pool's drives are reached in another way: how, attaching again as the same incarnation tells. Nothing
        else changes, and what is under way goes on."""
        with self._change:
            standing, request = self._current, self._request
        if standing is None or request is None or standing.attachment.holder_id != holder_id:
            return
        attachment = self._service.attach(request, deadline_s=ATTACH_DEADLINE_S)
        with self._change:
            if self._current is standing:
                self._current = replace(standing, attachment=attachment)


def _host_key_id(attachment: api.Attachment) -> str:
    export = attachment.export
    return key_id(export.host_key) if export is not None and export.host_key else ""
